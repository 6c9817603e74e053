"""Permissions, which bind everybody but root, whom tests may be run by."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TEMPORARY = tempfile.gettempdir()  # before a test starts a run in this process, which has a folder of its own


@contextmanager
def folder_for_everybody() -> Iterator[Path]:
    """Make a temporary folder that other users can read, as they cannot pytest's own if root runs the tests."""
    with tempfile.TemporaryDirectory(dir=_TEMPORARY) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Be a user whom permissions bind, as they do not bind root."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)
