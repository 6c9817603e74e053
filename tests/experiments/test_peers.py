"""The comparison with the peers, on tiny models: all engines do the same, and a record comes out."""

from pathlib import Path

import numpy as np
import pytest

from gpipe.records import read_records
from tests.experiments.peer_gradients import gradients
from tests.support.process_pool import ProcessPool
from tests.support.program_server import run_program

TINY = (
    "--scale",
    "tiny",
    "--models",
    "transformer",
    "--num-stages",
    "1,2",
    "--num-microbatches",
    "4",
    "--partitions",
    "2",
)
ENGINES = ("ours", "torch.distributed.pipelining", "torchgpipe")
PARTITIONS = {"amoebanet": [4, 5], "transformer": [3, 5]}  # the first has two tensors at its boundary
ON_ONE_CORE = """
import os, runpy
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
runpy.run_module("experiments.peers", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("workload", PARTITIONS)
def test_all_engines_compute_the_same_gradients(workload: str, processes: ProcessPool) -> None:
    partitions = PARTITIONS[workload]
    found = {}
    for engine in ENGINES:
        num_processes = 1 if engine == "torchgpipe" else 2
        parts = processes.run(num_processes, gradients, num_processes, engine, workload, partitions)
        found[engine] = {name: gradient for part in parts for name, gradient in part.items()}
    assert sorted(found["torchgpipe"]) == sorted(found["ours"]) == sorted(found["torch.distributed.pipelining"])
    for name, gradient in found["ours"].items():
        for peer in ENGINES[1:]:
            scale = np.abs(gradient).max()
            np.testing.assert_allclose(found[peer][name], gradient, rtol=1e-4, atol=1e-4 * scale, err_msg=name)


def test_a_record_says_how_fast_and_large_each_engine_is(tmp_path: Path) -> None:
    options = (*TINY, "--rounds", "1", "--record", str(tmp_path))
    program = tmp_path / "peers_on_one_core.py"
    program.write_text(ON_ONE_CORE)
    done = run_program(program, *options)
    assert done.returncode == 0, done.stderr
    (record,) = read_records(tmp_path / "runs.jsonl")
    assert (record.kind, record.experiment) == ("measured", "peers")
    grid = record.results["grid"]
    assert [(row["num_stages"], row["engine"]) for row in grid] == [(k, name) for k in (1, 2) for name in ENGINES]
    for row in grid:
        if row["num_stages"] == 1:
            assert row["outcome"] == "measured" and row["examples_per_second"] > 0 and row["ours_over_this"] > 0
        else:
            assert row["outcome"].startswith("not run: 2 stages need 2 cores")
    choices = record.results["partitions"]
    assert {row["chosen_by"].split(",")[0] for row in choices} == {"ours", "torchgpipe", "torch"}
    assert all(row["slowest_over_optimum"] >= 1 for row in choices if row["partitions"] is not None)
