"""Pause garbage collection when imported: the fork server, which new processes are forked from, imports this first."""

from gpipe.launch import garbage_collection

garbage_collection.pause()
