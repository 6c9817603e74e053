"""A run's folder, as long as it is its own: neither removed, nor renamed, nor made anew by another run."""

import os
from pathlib import Path


class OwnFolder:
    """Knows a folder that exists from any other that later has its name."""

    def __init__(self, path: Path) -> None:
        self._path, self._found = path, path.stat()

    def check(self) -> None:
        """Raise ValueError if the folder is not there any more."""
        try:
            is_same = os.path.samestat(self._found, self._path.stat())
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise ValueError(
                f"the run's folder {self._path} was removed or renamed while the run went on: start the same command "
                "again, or move the folder back first."
            )
