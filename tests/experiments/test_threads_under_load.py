"""The study of threads lets processes take turns, beside work that it starts itself."""

import os

import pytest

from experiments import threads_under_load as study
from reproductions.bubble.overheads import THREADS_UNDER_LOAD, threads_under_load

PROGRAM = """
import os, sys
for _ in sys.stdin:
    print(0.5 if {num_threads} == 1 else 1.5 if "OMP_WAIT_POLICY" in os.environ else 2.0, flush=True)
"""


def test_each_round_compares_the_threads_of_a_process_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "WORK", PROGRAM)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # of this process, not of those that it starts
    rows = study.measure(rounds=2, num_cores=2)
    assert [(row["num_busy"], row["num_filters"]) for row in rows] == [(n, f) for n in (0, 1, 2) for f in study.FILTERS]
    for row in rows:
        assert row["one_thread_seconds"] == 0.5
        assert row["spinning"] == {"median": 4.0, "least": 4.0, "most": 4.0}
        assert row["sleeping"] == {"median": 3.0, "least": 3.0, "most": 3.0}
    config = {"num_layers": 3, "batch_size": 16, "rounds": 2}
    record = THREADS_UNDER_LOAD.make_record(config, {"rows": rows, "load_before": os.getloadavg()[0]})
    lines = threads_under_load([record]).splitlines()
    assert lines[2] == "| AmoebaNet-D (3,16) | 0 | 0.50 | 4.00 (4.00 to 4.00) | 3.00 (3.00 to 3.00) |"
