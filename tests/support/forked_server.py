"""Let the process that a run copies its processes from be a fork of the program, instead of a new Python.

The new Python would spend four seconds of processor time on importing torch and timm again, at each start of several
processes. All else is as in a new one: the process, its files, its signals, what it inherits, how it ends.
"""

import logging
import os
import signal
import warnings
from collections.abc import Collection
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import NoReturn

from gpipe.launch import stops

_start_new = util.spawnv_passfds


def fork_server_from_here() -> None:
    """From now on, fork the fork server from this process, which must have loaded what its processes need."""
    util.spawnv_passfds = start_as_fork


def start_as_fork(path: bytes, arguments: list[str], kept_files: list[int]) -> int:
    """Start the program of a path, as multiprocessing does it; the fork server is a fork of this process.

    Returns:
        The id of the new process.
    """
    command = arguments[-1]
    if "multiprocessing.forkserver" not in command:
        return _start_new(path, arguments, kept_files)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process may have threads
        pid = os.fork()
    if pid == 0:
        _serve(command, kept_files)
    return pid


def _serve(command: str, kept_files: Collection[int]) -> NoReturn:
    """Be the fork server: forget what a new Python would not know, and run its command."""
    try:
        forget_the_program()
        forkserver._forkserver.__init__()  # type: ignore[misc]  # its lock is held: this is in the middle of its start
        resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
        _close_other_ends(kept_files)
        exec(command)
    finally:
        os._exit(0)


def forget_the_program() -> None:
    """Forget, in a fork, which signals the program listens to and where it logs."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stops._listener = None
    logging.root.handlers.clear()


def _close_other_ends(kept_files: Collection[int]) -> None:
    """Close the program's end of the pipe by which the fork server notices that nobody needs it any more.

    Other files stay open: libraries have pipes of their own, which they replace in each fork.
    """
    own = {int(path.name): _name(path) for path in Path("/proc/self/fd").iterdir()}
    pipes = {own[number] for number in kept_files}
    for number, name in own.items():
        if number not in kept_files and name in pipes:
            os.close(number)


def _name(path: Path) -> Path | None:
    try:
        return path.readlink()
    except FileNotFoundError:  # it was open while the folder was read
        return None
