"""Layers that sleep for a set time; any further time of a step is the engine's."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpipe.pipeline.layers import split_backward
from gpipe.planning.accelerator import LayerSeconds

FORWARD, BACKWARD = 0.004, 0.008  # seconds

_overshoot = 0.0
_seconds: defaultdict[float, list[float]] = defaultdict(list)


def calibrate(run: Callable[[], object] = lambda: _pause(FORWARD), seconds: float = FORWARD, sleeps: int = 1) -> None:
    """Shorten later sleeps by what each takes too long on this machine.

    Args:
        run: what to measure; with layers in it, what their operations take is part of the excess.
        seconds: how long it should take.
        sleeps: how many times it sleeps.
    """
    global _overshoot
    _overshoot = 0.0
    taken = []
    for _ in range(50):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    _overshoot = (statistics.median(taken) - seconds) / sleeps
    _seconds.clear()


def let_small_products_wait() -> None:
    """Let a split backward defer the gradients of all weights: a sleep stands for the work that small ones lack."""
    split_backward.SMALL_PRODUCT = 0


def read_median_seconds() -> tuple[float, float]:
    """Return the median seconds of this process's layers of 4 and 8 ms, forward and backward, since `calibrate`."""
    return statistics.median(_seconds[FORWARD]), statistics.median(_seconds[BACKWARD])


def _pause(seconds: float) -> None:
    if seconds == 0:
        return
    start = time.perf_counter()
    time.sleep(seconds - _overshoot)
    _seconds[seconds].append(time.perf_counter() - start)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        _pause(forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        _pause(ctx.seconds)
        return gradient, None, None


class SplitSleeper(nn.Module):
    """A layer of 4 ms forward, 4 ms for the gradient of its input, and 4 ms for that of its weight, or of other times.

    [n, size] -> the same shape. The weight's sleep is in the graph between the weight and the product, so whoever makes
    the weight's gradient sleeps.
    """

    def __init__(self, size: int, forward: float = FORWARD, inputs: float = FORWARD, weights: float = FORWARD) -> None:
        super().__init__()
        self.seconds = LayerSeconds(forward, forward, inputs + weights, weights)
        self.scale = nn.Parameter(torch.ones(()))  # gives the first stage a backward too
        self.weight = nn.Parameter(torch.eye(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with the weight, after the sleep."""
        seconds = self.seconds
        inputs = _Sleep.apply(x * self.scale, seconds.forward, seconds.backward - seconds.weights)
        output: Tensor = inputs @ _Sleep.apply(self.weight, 0.0, seconds.weights)
        return output


class Sleeper(nn.Module):
    """A layer of 4 ms forward and 8 ms backward, or of other times, with one parameter."""

    def __init__(self, forward_seconds: float = FORWARD, backward_seconds: float = BACKWARD) -> None:
        super().__init__()
        self.forward_seconds, self.backward_seconds = forward_seconds, backward_seconds
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the weight, after the sleep; any shape."""
        # This order gives the first stage a backward too.
        return _Sleep.apply(x * self.weight, self.forward_seconds, self.backward_seconds)
