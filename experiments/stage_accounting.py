"""Account every allocation of a step to the stage that holds it, while one process plays all stages.

A stage's forward, recomputation and backward run between two readings of the allocator. What a task leaves behind is
its stage's, except for boundary outputs and input gradients, which are their receiver's from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

import gpipe
from gpipe.pipeline.payload import Payload
from gpipe.pipeline.stage import Stage


class Allocator(Protocol):
    """Runs something and says what it allocated."""

    def watch(self, run: Callable[[], Any]) -> tuple[Any, int, int]:
        """Return its result, by how much the allocated bytes grew, and by how much they had grown at most."""


class ProcessorAllocator:
    """Torch's allocator of main memory, as its profiler sees it."""

    def watch(self, run: Callable[[], Any]) -> tuple[Any, int, int]:
        """Return its result, by how much the allocated bytes grew, and by how much they had grown at most."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            result = run()
        results = profiled.profiler.kineto_results
        events = [event for event in _flat(results.experimental_event_tree()) if event.typed[0] == _EventType.Allocation]
        grown = most = 0
        for event in sorted(events, key=lambda event: event.start_time_ns):
            grown += event.typed[1].alloc_size
            most = max(most, grown)
        return result, grown, most


class CudaAllocator:
    """The caching allocator of a GPU: what tensors take, rounded as it rounds."""

    def watch(self, run: Callable[[], Any]) -> tuple[Any, int, int]:
        """Return its result, by how much the allocated bytes grew, and by how much they had grown at most."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = run()
        return result, torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before


@dataclass
class Account:
    """What one stage holds: weights, buffers and optimiser state, what its tasks left behind, and its peak, in bytes."""

    fixed: int
    held: int = 0
    peak: int = 0


class Accounting:
    """Accounts of all stages of a pipeline; from its making on, every training step is accounted.

    Args:
        pipeline: that plays all its stages in this process.
        optimizer: whose state is held too, once it has made a step.
        allocator: of the device.
    """

    def __init__(self, pipeline: gpipe.Pipeline, optimizer: torch.optim.Optimizer | None, allocator: Allocator) -> None:
        self._allocator = allocator
        self._num_stages = pipeline.num_stages
        self.accounts = {index: Account(_fixed_bytes(stage, optimizer)) for index, stage in pipeline.stages.items()}
        for stage in pipeline.stages.values():
            self._watch(stage)

    def begin(self, input_bytes: int) -> None:
        """Begin a step, with the bytes of the mini-batch, which the first stage holds."""
        for index, account in self.accounts.items():
            account.held = account.peak = input_bytes if index == 0 else 0

    def peak_bytes(self) -> list[int]:
        """Return the most that each stage held since `begin`, with weights and optimiser state."""
        return [account.fixed + account.peak for _, account in sorted(self.accounts.items())]

    def _watch(self, stage: Stage) -> None:
        for name in ("forward", "recompute", "backward"):
            setattr(stage, name, self._watched(stage.index, name, getattr(stage, name)))

    def _watched(self, index: int, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        account = self.accounts[index]
        target = {"forward": index + 1, "backward": index - 1}.get(name)

        def watched(*args: Any, **options: Any) -> Any:
            result, grown, most = self._allocator.watch(lambda: run(*args, **options))
            account.peak = max(account.peak, account.held + most)
            account.held += grown
            if target in self.accounts:
                travelling = _storage_bytes(result.tensors)
                account.held -= travelling
                self.accounts[target].held += travelling
            return result

        return watched


def tensor_bytes(value: Any) -> int:
    """Return the bytes of the tensors of a nest, such as a mini-batch."""
    return _storage_bytes(Payload.of(value).tensors)


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _fixed_bytes(stage: Stage, optimizer: torch.optim.Optimizer | None) -> int:
    tensors = [tensor for layer in stage.layers.values() for tensor in layer.state_dict(keep_vars=True).values()]
    state = {} if optimizer is None else optimizer.state
    for tensor in list(tensors):
        with suppress(KeyError):
            tensors += [value for value in state[tensor].values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _flat(events: Iterable[Any]) -> Iterable[Any]:
    for event in events:
        yield event
        yield from _flat(event.children)
