"""All processes of a test run are forks of one server."""

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.support.program_server import REMEMBERED, start_function

SECONDS = 10  # in which what nobody needs any more ends


def tell_family(connection: Connection, number: int) -> None:
    """Send what it was called with, its process and its parent's; then live as long as the other end."""
    connection.send((number, os.getpid(), os.getppid()))
    with pytest.raises(EOFError):
        connection.recv()


def fail(connection: Connection) -> None:
    """Raise an error."""
    raise ValueError("it fails")


def test_functions_are_forks_of_one_server_which_ends_with_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(REMEMBERED, str(tmp_path))  # a server of this test
    first = start_function(tell_family, 1)
    number, process, server = first.recv()
    failing = start_function(fail)
    with pytest.raises(EOFError):
        failing.recv()
    first.close()
    _wait_for_the_end(process)
    # Within the moment in which the server looks whether anybody is left, or by a new one.
    second = start_function(tell_family, 2)
    assert (number, second.recv()[0]) == (1, 2)
    second.close()
    failing.close()
    _wait_for_the_end(server)
    assert "ValueError: it fails" in capfd.readouterr().err


def test_two_that_live_have_the_same_server() -> None:
    connections = [start_function(tell_family, number) for number in range(2)]
    (_, one, server), (_, other, same_server) = (connection.recv() for connection in connections)
    assert one != other and server == same_server
    for connection in connections:
        connection.close()


def _wait_for_the_end(process: int) -> None:
    deadline = time.monotonic() + SECONDS
    while Path(f"/proc/{process}/stat").exists() and _state(process) != "Z":
        assert time.monotonic() < deadline, f"process {process} does not end"
        time.sleep(0.02)


def _state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
