"""Python's garbage collector, which searches all that is loaded for cycles: a second at the start, and one at the end.

What a program loads stays until it ends, and what ends with it need not be searched.
"""

import atexit
import gc


def rest() -> None:
    """Collect nothing from here on, until `work` is called, and nothing at the end of the process."""
    gc.disable()
    atexit.register(gc.freeze)


def work() -> None:
    """Collect again, without ever searching what is there already; nothing changes where it does not rest."""
    if not gc.isenabled():  # else garbage, of a job of a sweep perhaps, would stay for ever
        gc.freeze()
        gc.enable()
