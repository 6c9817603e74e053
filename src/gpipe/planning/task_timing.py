"""Measure what the engine adds to a task on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from gpipe.pipeline.engine import Pipeline
from gpipe.planning.timing import cool_caches

_NUM_STAGES, _NUM_MICROBATCHES, _SIZE = 2, 8, 16
_STEPS = 8  # after one that does not count


def _compute() -> None:
    cool_caches(torch.device("cpu"))


def measure_task_seconds(work: Callable[[], None] = _compute) -> float:
    """Return the seconds of a task besides its layers' work, on a CPU.

    They depend on that work: layers that compute leave the engine cold caches, and on a CPU that slept while layers
    waited it is slower.

    Args:
        work: what each layer does, forward and backward; by default it empties the caches, as layers that compute do.
    """
    worked: list[float] = []

    def run() -> None:
        start = time.perf_counter()
        work()
        worked.append(time.perf_counter() - start)

    layers = nn.Sequential(*(_Worker(run) for _ in range(_NUM_STAGES)))
    pipeline = Pipeline(layers, _add_up, [1] * _NUM_STAGES, _NUM_MICROBATCHES, rematerialize="never")
    batch = torch.ones(_NUM_MICROBATCHES, _SIZE), torch.ones(_NUM_MICROBATCHES)
    found = []
    for _ in range(_STEPS + 1):
        worked.clear()
        timeline = pipeline.train_step(batch, record_timeline=True).timeline
        assert timeline is not None
        found.append((sum(timeline.busy_seconds()) - sum(worked)) / len(timeline.events))
    return median(found[1:])


class _Worker(nn.Module):
    """A layer that only calls `run`, in its forward and in its backward."""

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__()
        self.run = run
        self.weight = nn.Parameter(torch.ones(()))  # gives the first stage a backward too

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = inputs * self.weight
        outputs.register_hook(lambda _: self.run())
        self.run()
        return outputs


def _add_up(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.sum()
