"""A run that is killed twenty times at random moments ends as one that nobody disturbed."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.reliability.session import assert_same, run_folder
from tests.support.program_server import Program

pytestmark = pytest.mark.reliability
SCRIPT = Path(__file__).with_name("kill_at_random.py")


def test_twenty_kills_leave_no_trace(tmp_path: Path) -> None:
    (output := tmp_path / "output.txt").touch()
    program = Program(SCRIPT, str(tmp_path), "20", "7", folder=SCRIPT.parent, output=output)
    try:
        assert program.wait(280) == 0, output.read_text()
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
    found = json.loads(output.read_text().splitlines()[-1])
    assert found == {"killed": 20, "ended": 0}, "a run that ends before it is killed proves nothing"
    assert_same(run_folder(tmp_path / "killed"), run_folder(tmp_path / "whole"))
