"""Lock a run's folder for one process at a time. The lock is on a file in the folder that names its holder.

However the process ends, its lock ends with it; a file that a killed process left behind locks nothing.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK_FILE = ".lock"
_TRIES = 100  # another process may remove an empty folder or its own lock between two of our steps
_ORPHAN_SECONDS = 1.0
_MAX_BYTES = 200  # of a holder's name
_held: set[int] = set()  # this process's descriptors


class FolderHeld(Exception):
    """The folder is in use; the message says by whom, without a full stop."""


@contextmanager
def hold(folder: Path, *, is_new: bool = False) -> Iterator[None]:
    """Hold a folder while the body runs; create it if it does not exist.

    Args:
        folder: the folder.
        is_new: refuse a folder that is not empty.

    Raises:
        FolderHeld: another process holds the folder, or it should be new and is not empty.
    """
    descriptor = _lock(folder, os.O_EXCL if is_new else 0)
    _held.add(descriptor)
    try:
        if is_new and any(path.name != LOCK_FILE for path in folder.iterdir()):
            raise FolderHeld(f"{folder} is not empty")
        yield
    finally:
        if descriptor in _held:  # not in a process forked meanwhile
            with suppress(OSError):  # it is gone, or the folder is read-only by now
                (folder / LOCK_FILE).unlink()
            _held.remove(descriptor)
            os.close(descriptor)


def _lock(folder: Path, flags: int) -> int:
    """Return the descriptor of a folder's locked file."""
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = _open(folder, flags)
            if _is_locked(folder, descriptor):
                return descriptor
            os.close(descriptor)
    raise FolderHeld(f"{folder} is made and removed by others again and again")


def _open(folder: Path, flags: int) -> int:
    try:
        return os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | flags, 0o644)
    except FileExistsError:  # with O_EXCL, even without working locks only one run creates the file
        raise FolderHeld(f"{folder} was taken a moment ago") from None


def _is_locked(folder: Path, descriptor: int) -> bool:
    """Lock the file; return False if its holder has just removed it.

    Raises:
        FolderHeld: another process holds it; the file is closed.
    """
    try:
        _lock_file(descriptor)
    except BlockingIOError:
        holder = _read_holder(descriptor)
        os.close(descriptor)
        raise FolderHeld(f"{folder} is in use by {holder}") from None
    except OSError:  # a file system without locks: there, holders cannot be detected
        pass
    if not _is_in(folder, descriptor):
        return False
    with suppress(OSError):  # a full disk: the lock holds without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return True


def _lock_file(descriptor: int) -> None:
    """Lock a file; wait a moment if a dead holder has just forked, because its child unlocks as soon as it runs.

    Raises:
        BlockingIOError: another process holds it.
    """
    deadline = time.monotonic() + _ORPHAN_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline or not _is_dead(_read_holder(descriptor)):
                raise
        time.sleep(0.01)


def _is_dead(holder: str) -> bool:
    """Return whether a holder is known to have ended: it is of this host, and its process is gone."""
    word, _, rest = holder.partition(" ")
    number, _, host = rest.partition(" on ")
    if word != "process" or host != socket.gethostname() or not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # of another user
        pass
    return False


def _is_in(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), (folder / LOCK_FILE).stat())
    except FileNotFoundError:
        return False


def _read_holder(descriptor: int) -> str:
    text = os.pread(descriptor, _MAX_BYTES, 0).decode("utf-8", "replace").strip()
    return text if text.isprintable() and text else "another process"


def _close_inherited() -> None:
    """Close the locks that a forked process inherits: a data worker must not hold the folder of a dead run."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_inherited)
