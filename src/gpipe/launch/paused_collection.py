"""Pause garbage collection by being imported: the first module of the process that new processes are copies of."""

from gpipe.launch import garbage_collection

garbage_collection.pause()
