"""Attribute every allocation of a step to the device that would hold it, while one process plays all stages.

The allocator is read before and after each forward, recomputation and backward of a stage. Memory that a task leaves
behind belongs to its stage's device, except for boundary outputs and input gradients, which from then on belong to the
receiver's device. Memory that is freed after a task, such as the gradients that it received, is also attributed to its
device.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._C._profiler import _EventType  # noqa: TID251 - the kinds of a public profile
from torch.profiler import ProfilerActivity, profile, record_function

import gpipe
from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.stage import Stage

_TASK = "gpipe.task"


class Reading(NamedTuple):
    """The growth of the allocated bytes since the previous task, in the task, and at most within it."""

    between: int
    grown: int
    most: int


class Allocator(Protocol):
    """An allocator whose allocations by tasks can be read.

    Attributes:
        readings: of the step's tasks, in order.
    """

    readings: list[Reading]

    def step(self, run: Callable[[], Any]) -> None:
        """Run a step; its tasks must run through `task`."""

    def task(self, run: Callable[[], Any]) -> Any:
        """Run a task and return its result."""


class ProcessorAllocator:
    """Torch's allocator of main memory, as its profiler sees it."""

    def __init__(self) -> None:
        self.readings: list[Reading] = []

    def step(self, run: Callable[[], Any]) -> None:
        """Run a step under the profiler, and read its tasks."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            run()
        events = list(_flatten(profiled.profiler.kineto_results.experimental_event_tree()))
        tasks = [(event.start_time_ns, event.end_time_ns) for event in events if event.name == _TASK]
        changes = sorted(
            (event.start_time_ns, event.typed[1].alloc_size)
            for event in events
            if event.typed[0] == _EventType.Allocation
        )
        before = 0
        for start, end in sorted(tasks):
            between = sum(size for at, size in changes if before <= at < start)
            course = list(accumulate((size for at, size in changes if start <= at < end), initial=0))
            self.readings.append(Reading(between, course[-1], max(course)))
            before = end

    def task(self, run: Callable[[], Any]) -> Any:
        """Run a task under a name that the profile shows."""
        with record_function(_TASK):
            return run()


class CudaAllocator:
    """The caching allocator of a GPU, with its rounding."""

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self._last = 0

    def step(self, run: Callable[[], Any]) -> None:
        """Run a step."""
        self._last = torch.cuda.memory_allocated()
        run()

    def task(self, run: Callable[[], Any]) -> Any:
        """Run a task and read the allocator before and after it."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = run()
        after, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        self.readings.append(Reading(before - self._last, after - before, most - before))
        self._last = after
        return result


@dataclass
class Account:
    """The bytes of a device: weights, buffers and optimiser state; what its tasks left behind; the peak of that."""

    fixed: int = 0
    held: int = 0
    peak: int = 0


class Accounting:
    """Accounts of all devices that a pipeline would have.

    Args:
        pipeline: plays all its stages in this process.
        optimizer: its state counts, once it has made a step.
        allocator: of the device.
        placement: the device of each stage; None gives each its own.
    """

    def __init__(
        self,
        pipeline: gpipe.Pipeline,
        optimizer: torch.optim.Optimizer | None,
        allocator: Allocator,
        placement: Sequence[int] | None = None,
    ) -> None:
        self._allocator = allocator
        self._pipeline = pipeline
        self._placement = dict(enumerate(range(pipeline.num_stages) if placement is None else placement))
        self._tasks: list[tuple[int, int, int]] = []  # device, that of the result's receiver, bytes of that
        self.accounts: dict[int, Account] = {}
        for index, stage in pipeline.stages.items():
            account = self.accounts.setdefault(self._placement[index], Account())
            account.fixed += _count_fixed_bytes(stage, optimizer)
            self._watch(stage)

    def step(self, batch: tuple[Any, Any]) -> list[int]:
        """Make a training step; return the peak of each device in bytes, with weights and optimiser state."""
        for account in self.accounts.values():
            account.held = account.peak = 0
        first = self.accounts[self._placement[0]]
        first.held = first.peak = _count_storage_bytes(Payload.of(batch[0]).tensors)
        self._tasks.clear()
        self._allocator.readings.clear()
        self._allocator.step(lambda: self._pipeline.train_step(batch))
        account = first
        for (device, target, travelling), reading in zip(self._tasks, self._allocator.readings, strict=True):
            account.held += reading.between  # of the previous task
            account = self.accounts[device]
            account.peak = max(account.peak, account.held + reading.most)
            account.held += reading.grown
            if target in self.accounts:
                account.held -= travelling
                self.accounts[target].held += travelling
        return [account.fixed + account.peak for _, account in sorted(self.accounts.items())]

    def _watch(self, stage: Stage) -> None:
        for name in ("forward", "recompute", "backward", "make_weight_gradients"):
            setattr(stage, name, self._wrap(stage.index, name, getattr(stage, name)))

    def _wrap(self, index: int, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        device = self._placement[index]
        target = self._placement.get({"forward": index + 1, "backward": index - 1}.get(name, index), -1)

        def run_and_account(*args: Any, **options: Any) -> Any:
            result = self._allocator.task(lambda: run(*args, **options))
            if target != device:  # where the receiver has a copy, whatever the sender keeps
                result.tensors = [tensor.clone() for tensor in result.tensors]
            self._tasks.append((device, target, 0 if result is None else _count_storage_bytes(result.tensors)))
            return result

        return run_and_account


def measure_peaks(
    pipeline: gpipe.Pipeline,
    batch: tuple[Any, Any],
    allocator: Allocator,
    placement: Sequence[int] | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[int]:
    """Make two steps and close the pipeline; return each device's peak in the second, when the optimiser has state."""
    optimizer = torch.optim.RMSprop(pipeline.parameters(), lr=1e-6)
    with closing(pipeline), autocast():
        pipeline.train_step(batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return Accounting(pipeline, optimizer, allocator, placement).step(batch)


def _count_storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _count_fixed_bytes(stage: Stage, optimizer: torch.optim.Optimizer | None) -> int:
    tensors = [tensor for layer in stage.layers.values() for tensor in layer.state_dict(keep_vars=True).values()]
    state = {} if optimizer is None else optimizer.state
    for tensor in list(tensors):
        with suppress(KeyError):
            tensors += [value for value in state[tensor].values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _flatten(events: Iterable[Any]) -> Iterable[Any]:
    for event in events:
        yield event
        yield from _flatten(event.children)
