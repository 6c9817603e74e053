"""Files of a run: each appears complete or not at all, even if the process or the machine stops meanwhile.

A run also checks that its folder is still its own: not removed, renamed, or recreated by another run.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write, then replace the file by it; if the body or the disk fails, nothing has changed.

    The path has the same folder and suffix.

    Raises:
        OSError: the file cannot be written; the error names `path` if the system names no file.
    """
    partial = path.with_name(f".partial.{path.name}")
    try:
        yield partial
        flush(partial)
        partial.replace(path)
        flush(path.parent)
    except OSError as error:
        if error.filename is None:  # as for a full disk
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_flushed(path: Path, content: str | bytes) -> None:
    """Write a small file, text as UTF-8, so that it appears complete and is on disk."""
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for a lock file and hold the lock; the system releases it when the process exits or is killed."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class OwnFolder:
    """Distinguishes an existing folder from any other that later has its name."""

    def __init__(self, path: Path) -> None:
        self._path, self._found = path, path.stat()

    def check(self) -> None:
        """Raise ValueError if the folder is gone."""
        try:
            is_same = os.path.samestat(self._found, self._path.stat())
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise ValueError(
                f"the run's folder {self._path} was removed or renamed during the run: start the same command again, "
                "or move the folder back first."
            )
