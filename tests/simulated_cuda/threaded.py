"""What layers do that run in launching threads: they meet, they fail, and they draw random numbers on the host."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gpipe

SECONDS = 10.0  # after which two threads do not meet any more
NAME = "gpipe-launches-"  # of launching threads


class _Calling(nn.Module):
    """Calls a function, if it has one, and returns its input."""

    call: Callable[[], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.call is not None:
            self.call()
        return x


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(1),
    "Python": random.random,
    "numpy": np.random.rand,
}


def _pipeline() -> tuple[gpipe.Pipeline, list[_Calling]]:
    calling = [_Calling(), _Calling()]
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), calling[0], nn.Linear(4, 4), calling[1])
    pipeline = gpipe.Pipeline(
        layers, nn.functional.cross_entropy, [2, 2], 2, rematerialize="never", devices=["cuda:0", "cuda:1"]
    )
    pipeline.use_device_threads()
    return pipeline, calling


def _train(pipeline: gpipe.Pipeline) -> float:
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(4, 4, generator=generator), torch.randint(4, (4,), generator=generator)
    return pipeline.train_step(batch).loss


def meet(rank: int) -> tuple[bool, int]:
    """Return whether a forward of the first stage and an earlier one of the second can meet, and the threads left."""
    pipeline, (first, second) = _pipeline()
    _train(pipeline)
    barrier, calls = threading.Barrier(2), [0, 0]

    def call(stage: int, which: int) -> None:
        calls[stage] += 1
        if calls[stage] == which:
            barrier.wait(SECONDS)

    first.call, second.call = lambda: call(0, 2), lambda: call(1, 1)
    _train(pipeline)
    pipeline.close()
    return not barrier.broken, _count_launching()


def fail(rank: int, stage: int) -> tuple[str, bool]:
    """Return what is said when a layer of a stage fails in its thread, and whether the next step goes well."""
    pipeline, calling = _pipeline()
    loss = _train(pipeline)

    def call() -> None:
        calling[stage].call = None
        raise ZeroDivisionError("by nobody")

    calling[stage].call = call
    try:
        _train(pipeline)
    except gpipe.PipelineError as error:
        said = str(error)
    return said, _train(pipeline) == loss


def interrupt(rank: int) -> bool:
    """Return whether the next step goes well after a signal's handler raised an error while threads launched."""

    def give_up(*_: object) -> None:
        raise KeyboardInterrupt

    pipeline, (_, second) = _pipeline()
    loss = _train(pipeline)
    signal.signal(signal.SIGUSR1, give_up)
    second.call = lambda: os.kill(os.getpid(), signal.SIGUSR1)
    with suppress(KeyboardInterrupt):
        _train(pipeline)
        return False
    second.call = None
    return _train(pipeline) == loss


def release(rank: int) -> int:
    """Return how many launching threads are left once nobody has the pipeline any more."""
    pipeline, _ = _pipeline()
    for _ in range(2):
        _train(pipeline)
    threads = [one for one in threading.enumerate() if one.name.startswith(NAME)]
    assert len(threads) == 2
    del pipeline
    gc.collect()
    for thread in threads:
        thread.join(SECONDS)
    return _count_launching()


def train_beside(rank: int, device: str) -> list[float]:
    """Return the losses of batches that streams beside the default ones make on a GPU."""
    pipeline, _ = _pipeline()
    with ExitStack() as streams:
        for index in range(torch.cuda.device_count()):
            streams.enter_context(torch.cuda.stream(torch.cuda.Stream(index)))
        inputs, targets = torch.ones(4, 4, device=device), torch.zeros(4, dtype=torch.int64, device=device)
        return [pipeline.train_step((inputs * number, targets + number)).loss for number in range(3)]


def _count_launching() -> int:
    return sum(one.name.startswith(NAME) for one in threading.enumerate())


def draw(rank: int, name: str) -> str:
    """Return what is said when a layer draws from a generator of the host."""
    pipeline, calling = _pipeline()
    calling[1].call = DRAWS[name]
    try:
        _train(pipeline)
    except gpipe.PipelineError as error:
        return str(error)
    return ""
