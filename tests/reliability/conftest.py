"""One undisturbed run for all tests here, and sessions that end with their test."""

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.session import Session, run_folder


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a session that nobody disturbed; the processes of pytest-xdist share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "whole"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            session = Session(folder, "one process")
            assert session.status() == 0, session.said()
            session.close()
    return run_folder(folder)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """Starts sessions in the test's folder; what is left of them ends with the test."""
    sessions: list[Session] = []

    def begin(launch: str, *arguments: str, **how: Any) -> Session:
        sessions.append(Session(tmp_path, launch, *arguments, **how))
        return sessions[-1]

    yield begin
    for session in sessions:
        session.close()
