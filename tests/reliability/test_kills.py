"""A run that is killed twenty times at random moments ends as one that nobody disturbed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.session import ROOT, assert_same, run_folder

pytestmark = pytest.mark.reliability
SCRIPT = Path(__file__).with_name("kill_at_random.py")


def train(folder: Path, num_kills: int, seconds: float) -> dict[str, Any]:
    """Run the script; return what it printed last."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(folder), str(num_kills), str(seconds), "7"]
    done = subprocess.run(
        command, cwd=SCRIPT.parent, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_twenty_kills_leave_no_trace(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "whole", 0, 0)
    assert undisturbed["ended"] == 1
    found = train(tmp_path / "killed", 20, undisturbed["seconds"] / 5)
    assert found["killed"] == 20, "a run that ends before it is killed proves nothing"
    assert_same(run_folder(tmp_path / "killed"), run_folder(tmp_path / "whole"))
