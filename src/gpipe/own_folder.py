"""Check that a run's folder is still its own: not removed, renamed, or recreated by another run."""

import os
from pathlib import Path


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
