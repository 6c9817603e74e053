"""Measure whether a second thread per process pays off, on an idle machine and beside other work.

    python -m experiments.threads_under_load

A process with one thread takes turns with two processes that have a thread per core. The threads of one spin while they
wait, which is OpenMP's default; those of the other sleep (OMP_WAIT_POLICY=PASSIVE). Each round gives the ratios to the
single thread. The study starts the other work itself: processes that compute without pause. Two minutes on an idle
machine.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import gpipe
from experiments.program import StudyProgram, track
from gpipe.models import amoebanet_d
from reproductions.bubble.overheads import THREADS_UNDER_LOAD

ROOT = Path(__file__).parents[1]
NUM_LAYERS, BATCH_SIZE, IMAGE_SIZE, NUM_MICROBATCHES = 3, 16, 32, 2
FILTERS = (16, 64)
WORK = "from experiments.threads_under_load import work; work({num_threads}, {num_filters})"
BUSY = "while True: pass"


def work(num_threads: int, num_filters: int) -> None:
    """Be a process of the study: train a step for every line on standard input, and answer with its seconds."""
    torch.set_num_threads(num_threads)
    layers = amoebanet_d(NUM_LAYERS, num_filters, 10, image_channels=1)
    pipeline = gpipe.Pipeline(gpipe.convert_batch_norm(layers), F.cross_entropy, [len(layers)], NUM_MICROBATCHES)
    batch = torch.randn(BATCH_SIZE, 1, IMAGE_SIZE, IMAGE_SIZE), torch.randint(10, (BATCH_SIZE,))
    for _ in sys.stdin:
        start = time.perf_counter()
        pipeline.train_step(batch)
        print(json.dumps(time.perf_counter() - start), flush=True)


@contextmanager
def running(code: str, policy: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a program in another process while the body runs; `policy` is its OMP_WAIT_POLICY, None for torch's."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment |= {"PYTHONPATH": str(ROOT / "src")} | ({} if policy is None else {"OMP_WAIT_POLICY": policy})
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=ROOT, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def time_step(process: subprocess.Popen[str]) -> float:
    """Let a process train one step; return its seconds."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def measure(rounds: int, num_cores: int) -> list[dict[str, Any]]:
    """Return a row per size of the model and load: the seconds of one thread, and the ratios of a thread per core."""
    kinds = {"one": (1, "PASSIVE"), "spinning": (num_cores, None), "sleeping": (num_cores, "PASSIVE")}
    with ExitStack() as stack:
        processes = {
            (num_filters, kind): stack.enter_context(
                running(WORK.format(num_threads=num_threads, num_filters=num_filters), policy)
            )
            for num_filters, (kind, (num_threads, policy)) in product(FILTERS, kinds.items())
        }
        for process in processes.values():
            time_step(process)  # warms up
        rows = []
        for num_busy, num_filters in track(list(product(sorted({0, 1, num_cores}), FILTERS)), "loads and models"):
            with ExitStack() as busy:
                for _ in range(num_busy):
                    busy.enter_context(running(BUSY))
                times = [{kind: time_step(processes[num_filters, kind]) for kind in kinds} for _ in range(rounds)]
            row: dict[str, Any] = {"num_filters": num_filters, "num_busy": num_busy}
            row["one_thread_seconds"] = statistics.median(each["one"] for each in times)
            for kind in ("spinning", "sleeping"):
                ratios = sorted(each[kind] / each["one"] for each in times)
                row[kind] = {"median": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}
            rows.append(row)
    return rows


if __name__ == "__main__":
    tables = {"bubble": THREADS_UNDER_LOAD.tables}
    program = StudyProgram(__doc__, tables, rounds=7, what_rounds_are="steps of each")
    options = program.parse()
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load_before = os.getloadavg()[0]
    rows = measure(options.rounds, num_cores)
    settings = {
        "rounds": options.rounds,
        "num_layers": NUM_LAYERS,
        "batch_size": BATCH_SIZE,
        "image_size": IMAGE_SIZE,
        "num_microbatches": NUM_MICROBATCHES,
    }
    program.publish_record(THREADS_UNDER_LOAD.make_record(settings, {"rows": rows, "load_before": load_before}))
