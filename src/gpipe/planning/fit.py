"""Keep as many graphs as there is memory for: rematerialize=fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpipe.pipeline.schedule import Kind, Rematerialization, Rematerialize, StepSchedule, Task, with_recomputations


@dataclass(frozen=True)
class Fit:
    """Which micro-batches are recomputed: those whose graphs a device has no memory for.

    Attributes:
        memory_bytes: what the planned peak of a device may reach.
    """

    memory_bytes: int


def count_graphs(
    tasks: Sequence[Task], num_stages: int, stages: Sequence[int], fits: Callable[[list[Task]], bool]
) -> dict[int, int]:
    """Return how many graphs of forwards each stage of a device may keep at once.

    All stages get the same number, and then one after the other one more, as long as there is memory.

    Args:
        tasks: of the device, without recomputations.
        num_stages: K.
        stages: those of the device.
        fits: whether the device has memory for tasks with recomputations.
    """
    most = {stage: _count_at_once(tasks, stage) for stage in stages}

    def may(counts: dict[int, int]) -> bool:
        return fits(with_recomputations(tasks, tuple(counts.get(stage, 0) for stage in range(num_stages))))

    good, bad = 0, max(most.values()) + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if may(dict.fromkeys(stages, middle)) else (good, middle)
    counts = {stage: min(good, most[stage]) for stage in stages}
    for stage in stages if len(stages) > 1 else ():
        while counts[stage] < most[stage] and may(raised := counts | {stage: counts[stage] + 1}):
            counts = raised
    return counts


def _count_at_once(tasks: Sequence[Task], stage: int) -> int:
    """Return how many micro-batches of a stage are between forward and backward at once, at most."""
    now = most = 0
    for task in tasks:
        if task.stage == stage:
            now += (task.kind is Kind.FORWARD) - task.kind.makes_gradients
            most = max(most, now)
    return most


def name_mode(counts: tuple[int, ...], schedule: StepSchedule) -> Rematerialization:
    """Return the mode that numbers of graphs come to in a schedule without recomputations; else the numbers."""
    for mode in Rematerialize:
        if all(with_recomputations(tasks, counts) == with_recomputations(tasks, mode) for tasks in schedule):
            return mode
    return counts
