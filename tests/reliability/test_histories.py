"""Whatever happens to runs, and in whatever order: each has a folder of its own, and ends as one that nobody disturbed.

Each history is played in some tenths of a second a start; one that went wrong is played alone, and keeps its folder, by

    PYTHONPATH=src:. python -m tests.reliability.histories FOLDER SEED
"""

import json
from pathlib import Path

import pytest

from tests.reliability.session import ROOT
from tests.support.program_server import run_program

pytestmark = pytest.mark.reliability
NUM_HISTORIES = 150
NUM_TOGETHER = 50  # which share the load of the program and the undisturbed runs


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, NUM_HISTORIES, NUM_TOGETHER))
def test_random_histories(first: int, tmp_path: Path) -> None:
    seeds = [str(first), str(first + NUM_TOGETHER - 1)]
    path = f"{ROOT / 'src'}:{ROOT}"
    done = run_program("tests.reliability.histories", str(tmp_path), *seeds, folder=ROOT, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert all(counts[status] >= NUM_TOGETHER // 15 for status in ("0", "1", "75", "-9")), (
        f"what does not happen proves nothing: {counts}"
    )
    assert counts["compared"] >= NUM_TOGETHER // 2
