"""Layers that take a set time without the processor: what they cost more than that is the engine's."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

FORWARD, BACKWARD = 0.004, 0.008  # seconds

_overshoot = 0.0
_seconds: dict[float, list[float]] = {FORWARD: [], BACKWARD: []}


def calibrate() -> None:
    """Measure by how much a sleep on this machine exceeds what was asked for; later ones ask for so much less."""
    global _overshoot
    _overshoot = 0.0
    for _ in range(50):
        _pause(FORWARD)
    _overshoot = statistics.median(_seconds[FORWARD]) - FORWARD
    _seconds[FORWARD].clear()


def measured_seconds() -> tuple[float, float]:
    """Return the medians of what the layers of this process took forward and backward since `calibrate`."""
    return statistics.median(_seconds[FORWARD]), statistics.median(_seconds[BACKWARD])


def _pause(seconds: float) -> None:
    start = time.perf_counter()
    time.sleep(seconds - _overshoot)
    _seconds[seconds].append(time.perf_counter() - start)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        _pause(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        _pause(BACKWARD)
        return gradient


class Sleeper(nn.Module):
    """A layer of 4 ms forward and 8 ms backward, with one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the weight, later; any shape."""
        return _Sleep.apply(x * self.weight)  # in this order the first stage has a backward too
