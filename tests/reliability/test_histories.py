"""Whatever happens to runs, and in whatever order: each has a folder of its own, and ends as one that nobody disturbed.

Each history is played in some tenths of a second a start; one that went wrong is played alone, and keeps its folder, by

    PYTHONPATH=src:. python -m tests.reliability.histories FOLDER SEED
"""

import json
from pathlib import Path

import pytest

from tests.reliability.drawn_history import choose_seeds
from tests.reliability.session import ROOT
from tests.support.program_server import run_program

pytestmark = pytest.mark.reliability
NUM_RANDOM = 150  # the histories that are played have what so many have: `choose_seeds`
NUM_DRAWN = 1000  # and are chosen from so many
NUM_GROUPS = 3  # each shares the load of the program and the undisturbed runs


@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_random_histories(group: int, tmp_path: Path) -> None:
    seeds = choose_seeds(NUM_RANDOM, NUM_DRAWN)[group::NUM_GROUPS]
    path = f"{ROOT / 'src'}:{ROOT}"
    words = [str(tmp_path), *map(str, seeds)]
    done = run_program("tests.reliability.histories", *words, folder=ROOT, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert all(counts[status] >= 3 for status in ("0", "1", "75", "-9")), (
        f"what does not happen proves nothing: {counts}"
    )
    assert counts["compared"] >= len(seeds) // 2
