"""The clocks of several processes can stand side by side."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from gpipe.pipeline.measurement.clock import Clock
from gpipe.pipeline.schedule import Kind, Task


def test_an_interrupted_process_is_not_ahead_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    read = time.perf_counter
    delays = itertools.chain([0.05], itertools.repeat(0))  # interrupted once, between the readings of two clocks

    def read_late() -> float:
        time.sleep(next(delays))
        return read()

    cpu = torch.device("cpu")
    monkeypatch.setattr(time, "perf_counter", read_late)
    clock = Clock([cpu])
    before = time.time()
    clock.stop(Task(Kind.FORWARD, 0, 0), cpu, clock.start(cpu))
    after = time.time()
    (event,) = clock.events()
    assert before - 0.01 < event.start <= event.end < after + 0.01
