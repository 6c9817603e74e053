"""Lock a run's folder for one process at a time. The lock is on a file in the folder that names its holder.

However the process ends, its lock ends with it; a file that a killed process left behind locks nothing. The locks are
POSIX's, which a forked process does not inherit: a data worker must not hold the folder of a dead run.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK_FILE = ".lock"
_TRIES = 100  # another process may remove an empty folder or its own lock between two of our steps
_MAX_BYTES = 200  # of a holder's name
_held: set[Path] = set()  # by this process, which its own locks would not keep out


class FolderHeld(Exception):
    """The folder is in use; the message says by whom, without a full stop."""


@contextmanager
def hold(folder: Path, *, is_new: bool = False) -> Iterator[None]:
    """Hold a folder while the body runs; create it if it does not exist; with `is_new`, refuse one that is not empty.

    Raises:
        FolderHeld: another process holds the folder, or it should be new and is not empty.
    """
    if (place := folder.resolve()) in _held:
        raise FolderHeld(f"{folder} is in use by {_own_name()}")
    descriptor, own = _lock(folder, os.O_EXCL if is_new else 0), os.getpid()
    _held.add(place)
    try:
        if is_new and any(path.name != LOCK_FILE for path in folder.iterdir()):
            raise FolderHeld(f"{folder} is not empty")
        yield
    finally:
        if os.getpid() == own:  # not in a process forked meanwhile
            with suppress(OSError):  # it is gone, or the folder is read-only by now
                (folder / LOCK_FILE).unlink()
            _held.remove(place)
        os.close(descriptor)


def _lock(folder: Path, flags: int) -> int:
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | flags, 0o644)
            except FileExistsError:  # with O_EXCL, even without working locks only one run creates the file
                raise FolderHeld(f"{folder} was taken a moment ago") from None
            if _is_locked(folder, descriptor):
                return descriptor
            os.close(descriptor)
    raise FolderHeld(f"{folder} is made and removed by others again and again")


def _is_locked(folder: Path, descriptor: int) -> bool:
    """Lock the file; return False if its holder has just removed it, and close it if another process holds it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(descriptor, _MAX_BYTES, 0).decode("utf-8", "replace").strip()
        os.close(descriptor)
        holder = text if text.isprintable() and text else "another process"
        raise FolderHeld(f"{folder} is in use by {holder}") from None
    except OSError:  # a file system without locks: there, holders cannot be detected
        pass
    try:
        if not os.path.samestat(os.fstat(descriptor), (folder / LOCK_FILE).stat()):
            return False
    except FileNotFoundError:
        return False
    with suppress(OSError):  # a full disk: the lock holds without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{_own_name()}\n".encode(), 0)
    return True


def _own_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
