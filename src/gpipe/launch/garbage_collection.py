"""Pause Python's garbage collection, which takes a second at the start of a program and one at its end.

What a program loads stays until it exits, and what is freed at its exit need not be searched.
"""

import atexit
import gc


def pause() -> None:
    """Pause garbage collection until `resume` is called, and skip the last one, at the exit of the process."""
    gc.disable()
    atexit.register(gc.freeze)


def resume() -> None:
    """Resume a paused garbage collection; it never searches what exists already."""
    if not gc.isenabled():  # else the garbage of, say, each job of a sweep would stay for ever
        gc.freeze()
        gc.enable()
