"""Processes of these tests start without loading torch again."""

from multiprocessing import util

import pytest

from tests.support.forked_server import start_as_fork


@pytest.fixture
def forked_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process that new ones are copied from be a fork of this one."""
    monkeypatch.setattr(util, "spawnv_passfds", start_as_fork)
