"""Measure whether two threads of one process launch more kernels than one thread, and whether two processes do.

    python -m experiments.launching_threads

Each worker runs the layers of its own AmoebaNet, on images so small that Python and torch's dispatcher take most of the
time, as when a GPU waits for launches. One worker, two threads and two processes take turns. Needs two cores and a
minute.
"""

import multiprocessing
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from experiments.program import StudyProgram, track
from gpipe.models import amoebanet_d
from reproductions.bubble.overheads import LAUNCHING_THREADS

NUM_LAYERS, NUM_FILTERS, BATCH_SIZE, IMAGE_SIZE = 6, 8, 2, 32
SECONDS = 2.0  # of each turn
WORKERS = {"one thread": ("thread", 1), "two threads": ("thread", 2), "two processes": ("process", 2)}
PASSES = "forward, no gradients", "forward and backward"


def launch(passes: str, seconds: float, gate: Any, results: Any) -> None:
    """Be a worker: run the layers again and again, and put how often per second.

    Args:
        passes: one of PASSES.
        seconds: for how long.
        gate: a barrier, at which the workers wait for each other before they start.
        results: a queue.
    """
    torch.set_num_threads(1)
    model = amoebanet_d(NUM_LAYERS, NUM_FILTERS, 10, image_channels=1)
    images = torch.randn(BATCH_SIZE, 1, IMAGE_SIZE, IMAGE_SIZE)

    def run() -> None:
        with torch.set_grad_enabled(passes == PASSES[1]):
            outputs = model(images).sum()
        if outputs.requires_grad:
            outputs.backward()

    run()  # the first one chooses kernels
    gate.wait()
    start, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        run()
        count += 1
    results.put(count / elapsed)


def run_workers(kind: str, number: int, passes: str, seconds: float) -> float:
    """Return how many times per second all threads or processes together ran the layers."""
    start: Callable[..., Any]
    if kind == "thread":
        start, gate, results = threading.Thread, threading.Barrier(number), queue.SimpleQueue[float]()
    else:
        context = multiprocessing.get_context("forkserver")  # its copies have torch already
        start, gate, results = context.Process, context.Barrier(number), context.SimpleQueue()
    workers = [start(target=launch, args=(passes, seconds, gate, results)) for _ in range(number)]
    for worker in workers:
        worker.start()
    total = sum(results.get() for _ in workers)
    for worker in workers:
        worker.join()
    return total


def measure(rounds: int, seconds: float = SECONDS) -> list[dict[str, Any]]:
    """Return a row per kind of pass: runs per second of each kind of workers, round by round."""
    rows: list[dict[str, Any]] = [{"passes": passes, "per_second": {name: [] for name in WORKERS}} for passes in PASSES]
    for _ in track(range(rounds), "rounds"):
        for row in rows:
            for name, workers in WORKERS.items():
                row["per_second"][name].append(run_workers(*workers, row["passes"], seconds))
    return rows


if __name__ == "__main__":
    program = StudyProgram(__doc__, {"bubble": LAUNCHING_THREADS.tables}, rounds=5)
    options = program.parse()
    config = {
        "model": {"num_layers": NUM_LAYERS, "num_filters": NUM_FILTERS},
        "batch_size": BATCH_SIZE,
        "image_size": IMAGE_SIZE,
        "rounds": options.rounds,
        "seconds": SECONDS,
    }
    program.publish_record(LAUNCHING_THREADS.make_record(config, {"rows": measure(options.rounds)}))
