"""Pause Python's garbage collection, which takes a second at the start of a program and one at its end.

What a program loads lives until it exits, and at exit nothing needs to be searched for garbage.
"""

import atexit
import gc


def pause() -> None:
    """Pause garbage collection until `resume` is called, and skip the collection at the exit of the process."""
    gc.disable()
    atexit.register(gc.freeze)


def resume() -> None:
    """Resume a paused garbage collection; it skips objects that exist already."""
    if not gc.isenabled():  # freezing again would keep the garbage of, for example, each job of a sweep
        gc.freeze()
        gc.enable()
