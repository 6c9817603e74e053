"""A run that is killed twenty times at random moments ends as one that nobody disturbed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reliability.session import ROOT, assert_same, run_folder

pytestmark = pytest.mark.reliability
SCRIPT = Path(__file__).with_name("kill_at_random.py")


def test_twenty_kills_leave_no_trace(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(tmp_path), "20", "7"]
    done = subprocess.run(
        command, cwd=SCRIPT.parent, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"killed": 20, "ended": 0}, "a run that ends before it is killed proves nothing"
    assert_same(run_folder(tmp_path / "killed"), run_folder(tmp_path / "whole"))
