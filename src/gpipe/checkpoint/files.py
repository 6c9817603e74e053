"""Files of a checkpoint's folder: what they should be, and opening nothing else."""

import errno
import hashlib
import os
import stat
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from gpipe.checkpoint.errors import DamagedCheckpoint


@dataclass(frozen=True)
class FileEntry:
    """One file: its size in bytes and the SHA-256 of its content in hexadecimal."""

    size: int
    sha256: str

    def check(self, path: Path) -> None:
        """Compare a file with its size and SHA-256; raises DamagedCheckpoint naming what differs."""
        with open_regular(path) as file:
            found = os.fstat(file.fileno()).st_size
            if found != self.size:
                raise DamagedCheckpoint(
                    f"{path} has {found} bytes instead of {self.size}: it is damaged, choose another."
                )
            if hashlib.file_digest(file, "sha256").hexdigest() != self.sha256:
                raise DamagedCheckpoint(
                    f"{path} does not have the SHA-256 of its manifest: it is damaged, choose another."
                )


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read it; raises DamagedCheckpoint for one that is not there, and for a link, a pipe or a device.

    A link could lead out of the checkpoint's folder, and a pipe could keep the program waiting for ever.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing: the checkpoint is incomplete, choose another.") from None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
            raise
        raise _not_a_file(path) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_a_file(path)
    return open(descriptor, "rb")  # noqa: PTH123 - of a descriptor, not of a path


def _not_a_file(path: Path) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path} is not a regular file, such as a link that may lead elsewhere: choose another.")
