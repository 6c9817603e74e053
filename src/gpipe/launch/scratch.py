"""One temporary folder for a run's processes; if they were killed, the next start removes it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path

_PREFIX, _LOCK_FILE = "gpipe-", ".lock"
_LAST = -1000  # after multiprocessing has removed its own folder, which has -100


@cache
def scratch_folder() -> Path:
    """Return the folder for temporary files of this process, and of those that it starts, from now on.

    Libraries keep such files until a process ends, and a killed process leaves them behind. So the folder belongs to
    this process, which holds a lock in it until it ends. Folders whose lock is free are removed here.
    """
    _remove_dead(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    while _lock(folder) is None:  # another process took it for a dead one's, and removes it
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=_LAST)
    return folder


def _lock(folder: Path) -> int | None:
    """Lock a folder for as long as this process lives, and return the descriptor; None if another process holds it."""
    descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_dead(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another process may be removing it too
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not (folder / _LOCK_FILE).exists():
                continue  # another user's, or one whose owner is about to lock it
            if (descriptor := _lock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)
