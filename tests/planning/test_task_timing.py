"""What the engine adds to a task is what its layers' work leaves of it."""

from __future__ import annotations

import time

import pytest

from gpipe.planning.task_timing import measure_task_seconds


@pytest.mark.parametrize("worked", [0.0, 100.0])
def test_the_work_of_layers_is_not_counted(monkeypatch: pytest.MonkeyPatch, worked: float) -> None:
    """By a clock that only its readers and the work move: two readings lie around the work, two around those."""
    now, calls = 0.0, 0

    def read() -> float:
        nonlocal now
        now += 1.0
        return now

    def work() -> None:
        nonlocal now, calls
        now += worked
        calls += 1

    monkeypatch.setattr(time, "perf_counter", read)
    # Times since the epoch have a resolution of a fraction of a microsecond.
    assert measure_task_seconds(work) == pytest.approx(2.0, abs=1e-5)
    assert calls == 9 * 2 * 2 * 8, "of nine steps, in two stages, forward and backward of eight micro-batches"
