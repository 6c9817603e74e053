"""What goes wrong in a process of a pipeline, and what each process sees of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gpipe
from tests.support.calling_backward import CallingBackward
from tests.support.hosts import host_of_its_own

SECONDS = 5.0  # the contract's


class Broken(ArithmeticError):
    """What the tests raise."""


class Event(NamedTuple):
    """What a process saw last: an error, and when; times are the host's, the same for all processes."""

    kind: str
    text: str
    stage: int | None
    micro_batch: int | None
    layer: int | None
    time: float
    raised: float | None  # when this process itself did the damage
    again: str  # what a further step says
    is_ours: bool  # whether `except Broken` catches it


raised_at: float | None = None


def now() -> None:
    """Note when the damage is done."""
    global raised_at
    raised_at = time.monotonic()


class Layer(nn.Module):
    """A layer that does damage at some micro-batch of the second step, in forward, recomputation or backward."""

    def __init__(self, where: str = "", action: Callable[[], None] = now) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.where, self.action = where, action
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        # M = 4: the first step has calls 1 to 4 and recomputes in 5 to 8; micro-batch 2 is called 3rd, recomputed 2nd.
        if (self.where, self.calls) in (("forward", 11), ("recompute", 14)):
            self.action()
        x = self.linear(x)
        return CallingBackward.apply(x, self.action) if (self.where, self.calls) == ("backward", 14) else x


def raise_error() -> None:
    now()
    raise Broken("on purpose")


def raise_many_lines() -> None:
    now()
    raise Broken("on purpose,\nwhere a worker was")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def note_and(action: Callable[[], None], file: Path) -> None:
    file.write_text(str(time.monotonic()))
    action()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang() -> None:
    time.sleep(60)


class Loss:
    """A mean that does damage at micro-batch 2 of the second step, which the last stage recomputes 2nd."""

    def __init__(self, action: Callable[[], None] | None) -> None:
        self.action = action
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        if self.action is not None and self.calls == 6:
            self.action()
        return (outputs - targets).square().mean()


def train(
    rank: int,
    num_stages: int,
    culprit: int,
    where: str,
    action: Callable[[], None] = raise_error,
    timeout_seconds: float = 30.0,
    num_replicas: int = 1,
    slow: float = 0.0,
    stages_per_device: int = 1,
) -> Event | None:
    """Train three steps, in the second of which the process with rank `culprit` meets its fate."""
    global raised_at
    raised_at = None
    num_devices = num_stages // stages_per_device
    mesh = init_device_mesh("cpu", (num_replicas, num_devices), mesh_dim_names=("replica", "stage"))
    is_culprit = rank == culprit
    layers = nn.Sequential(*(Layer(where if is_culprit else "", action) for _ in range(num_stages)))
    if slow and rank % num_stages == 0:
        layers[0] = nn.Sequential(Sleep(slow), layers[0])
    loss = Loss(action if is_culprit and where == "loss" else None)
    pipeline = gpipe.Pipeline(
        layers, loss, [1] * num_stages, 4, mesh=mesh, timeout_seconds=timeout_seconds,
        schedule="gpipe" if stages_per_device == 1 else "interleaved_1f1b", stages_per_device=stages_per_device,
    )  # fmt: skip
    try:
        pipeline.train_step((torch.ones(8, 4), torch.ones(8, 4)))
        if is_culprit and where == "data":
            try:
                action()
            except Broken as error:
                pipeline.job.abort(error)
                raise
        # Behind the culprit, a stage may have finished the second step when it fails in its backward.
        for _ in range(2):
            pipeline.train_step((torch.ones(8, 4), torch.ones(8, 4)))
    except Exception as error:  # noqa: BLE001 - it is what the tests look at
        return describe(pipeline, error)
    return None


def train_apart(*args: Any) -> Event | None:
    """Train likewise, as if each process had a host of its own: messages go over Gloo, and not over sockets."""
    with host_of_its_own():
        return train(*args)


WIRES = pytest.mark.parametrize("run", [train, train_apart], ids=["one host", "hosts"])


def describe(pipeline: gpipe.Pipeline, error: Exception) -> Event:
    end = time.monotonic()
    again = ""
    try:
        pipeline.train_step((torch.ones(8, 4), torch.ones(8, 4)))
    except gpipe.PipelineError as refusal:
        again = str(refusal)
    place = (getattr(error, name, None) for name in ("stage", "micro_batch", "layer"))
    return Event(type(error).__name__, str(error), *place, end, raised_at, again, isinstance(error, Broken))


class Sleep(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x
