"""Keep as many graphs as fit the memory: rematerialize=fit."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from gpipe.pipeline.schedule import Kind, Rematerialization, Rematerialize, StepSchedule, with_recomputations
from gpipe.pipeline.schedules.choice import SCHEDULES
from gpipe.planning.memory import StageMemory, StateRatios, Walk


@dataclass(frozen=True)
class Fit:
    """Recompute the micro-batches whose graphs do not fit: a device's planned peak is at most `memory_bytes`."""

    memory_bytes: int


class Order(NamedTuple):
    """What decides the tasks of a step, apart from recomputations."""

    schedule: str
    num_stages: int
    num_microbatches: int
    stages_per_device: int
    synchronizes: bool
    averages: bool

    def tasks(self, rematerialize: Rematerialization) -> StepSchedule:
        """Return the ordered tasks of each device."""
        make = SCHEDULES[self.schedule]
        return make(self.num_stages, self.num_microbatches, rematerialize, self.stages_per_device)


def fit_graphs(
    order: Order,
    devices: Sequence[Mapping[int, StageMemory]],
    ratios: StateRatios,
    memory_bytes: int,
) -> Rematerialization:
    """Return how many micro-batches' graphs each stage may keep at once, or the mode that is equivalent.

    The planned peak of each device, of which `devices` has the stages by index, is at most `memory_bytes`.
    """
    counts = [0] * order.num_stages
    for device, stages in enumerate(devices):

        def fits(own: tuple[int, ...], device: int = device, stages: Mapping[int, StageMemory] = stages) -> bool:
            return walk_device(order, device, own).measure(stages, ratios).peak_bytes <= memory_bytes

        for stage, count in zip(sorted(stages), _count(_count_at_once(order, device), fits), strict=True):
            counts[stage] = count
    return _name(order, tuple(counts))


def _count(most: Sequence[int], fits: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...]:
    """Return a number for each stage of a device, at most `most`, such that they fit.

    All get the same number; then each stage in turn gets as many more as fit.
    """

    def limit(count: int) -> tuple[int, ...]:
        return tuple(min(count, own) for own in most)

    equal = bisect_left(range(1, max(most) + 1), True, key=lambda count: not fits(limit(count)))
    counts = list(limit(equal))
    for place in range(len(most)) if len(most) > 1 else ():
        while counts[place] < most[place]:
            raised = [*counts[:place], counts[place] + 1, *counts[place + 1 :]]
            if not fits(tuple(raised)):
                break
            counts = raised
    return tuple(counts)


# The results below do not depend on the cut, and many cuts need them.
@lru_cache(maxsize=64)
def _list_tasks(order: Order) -> StepSchedule:
    """Return the tasks of all devices, without recomputations."""
    return order.tasks(Rematerialize.NEVER)


@lru_cache(maxsize=2**12)
def walk_device(order: Order, device: int, mode: Rematerialization) -> Walk:
    """Return the walk through a device's tasks; `mode` is a mode, or a number for each of the device's stages."""
    tasks = _list_tasks(order)[device]
    if isinstance(mode, tuple):
        every = [0] * order.num_stages
        for stage, count in zip(sorted({task.stage for task in tasks}), mode, strict=True):
            every[stage] = count
        mode = tuple(every)
    tasks = with_recomputations(tasks, mode)
    return Walk.of(tasks, order.num_microbatches, synchronizes=order.synchronizes, averages=order.averages)


@lru_cache(maxsize=2**12)
def _count_at_once(order: Order, device: int) -> tuple[int, ...]:
    """Return the most micro-batches of each stage that are between forward and backward at once."""
    now, most = Counter[int](), Counter[int]()
    for kind, stage, _ in _list_tasks(order)[device]:
        now[stage] += (kind is Kind.FORWARD) - kind.makes_gradients
        most[stage] = max(most[stage], now[stage])
    return tuple(most[stage] for stage in sorted(most))


@lru_cache(maxsize=2**12)
def _name(order: Order, counts: tuple[int, ...]) -> Rematerialization:
    """Return the mode that is equivalent to numbers of graphs, or else the numbers."""
    for mode in (Rematerialize.NEVER, Rematerialize.ALWAYS, Rematerialize.EXCEPT_LAST):
        if all(with_recomputations(tasks, counts) == with_recomputations(tasks, mode) for tasks in _list_tasks(order)):
            return mode
    return counts
