"""The study of launching threads: one thread, two threads and two processes run layers, and take turns."""

import queue
import threading
from itertools import count

import pytest
import torch

from experiments import launching_threads as study
from reproductions.bubble.overheads import LAUNCHING_THREADS, launching_threads


def test_workers_start_together_and_their_runs_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(passes: str, seconds: float, gate: threading.Barrier, results: "queue.SimpleQueue[float]") -> None:
        gate.wait()  # for ever, unless there are as many workers as it waits for
        results.put(seconds * (passes == study.PASSES[0]))

    monkeypatch.setattr(study, "launch", launch)
    assert study.run_workers("thread", 2, study.PASSES[0], 1.5) == 3.0


def test_processes_run_the_layers_apart() -> None:
    assert study.run_workers("process", 2, study.PASSES[1], 0.05) > 0


def test_a_worker_counts_its_passes_and_only_one_kind_has_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    backwards, backward = count(), torch.Tensor.backward

    def counted(tensor: torch.Tensor) -> None:
        next(backwards)
        backward(tensor)

    monkeypatch.setattr(torch.Tensor, "backward", counted)
    for passes in study.PASSES:
        results: queue.SimpleQueue[float] = queue.SimpleQueue()
        study.launch(passes, 0.01, threading.Barrier(1), results)
        assert results.get() > 0
        assert (next(backwards) > 0) == (passes == study.PASSES[1])


def test_the_table_has_medians_of_the_rounds_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([10.0, 5.0, 20.0, 4.0, 4.0, 8.0] * 2 + [1.0, 9.0, 9.0] * 2)
    monkeypatch.setattr(study, "run_workers", lambda *_: next(speeds))
    record = LAUNCHING_THREADS.make_record({}, {"rows": study.measure(rounds=3)})
    lines = launching_threads([record]).splitlines()
    assert lines[0].endswith("| two threads / one thread | two processes / one thread |")
    assert lines[2:] == [
        "| forward, no gradients | 10.0 | 0.50 | 2.00 |",
        "| forward and backward | 4.0 | 1.00 | 2.00 |",
    ]
