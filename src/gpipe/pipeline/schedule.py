"""The tasks of a step, stage by stage: the engine executes them, the simulator times them, the plots draw them.

GPipe with K = 3 stages and M = 3 micro-batches (F forward, R recompute, B backward; a column is a moment):

    stage 0   F0 F1 F2        R2 . B2 R1 . B1 R0 . B0
    stage 1      F0 F1 F2   R2 B2 R1 . B1 R0 . B0
    stage 2         F0 F1 F2 R2 B2 R1 B1 R0 B0

A stage's tasks run in the order of its list, each as soon as the tasks that it depends on are done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeAlias


class Kind(StrEnum):
    """What a task does with a micro-batch."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


class Rematerialize(StrEnum):
    """Which micro-batches drop their activations after the forward pass and recompute them for the backward pass."""

    ALWAYS = "always"
    EXCEPT_LAST = "except_last"  # the micro-batch whose backward comes first is kept
    NEVER = "never"


class Task(NamedTuple):
    """One unit of work of one stage."""

    kind: Kind
    stage: int
    micro_batch: int


Schedule: TypeAlias = list[list[Task]]
"""The ordered tasks of each stage."""


def gpipe(num_stages: int, num_microbatches: int, rematerialize: Rematerialize = Rematerialize.ALWAYS) -> Schedule:
    """Return GPipe's schedule: all forwards, then all backwards in reverse order (section 2.2).

    A recomputation stands before its backward and does not depend on the gradient, so that it runs while the gradient
    is awaited.
    """
    last = num_microbatches - 1
    recomputed = {
        Rematerialize.ALWAYS: range(num_microbatches),
        Rematerialize.EXCEPT_LAST: range(last),
        Rematerialize.NEVER: range(0),
    }[rematerialize]
    schedule = inference(num_stages, num_microbatches)
    for stage, tasks in enumerate(schedule):
        for micro_batch in reversed(range(num_microbatches)):
            if micro_batch in recomputed:
                tasks.append(Task(Kind.RECOMPUTE, stage, micro_batch))
            tasks.append(Task(Kind.BACKWARD, stage, micro_batch))
    return schedule


def inference(num_stages: int, num_microbatches: int) -> Schedule:
    """Return the forwards alone, for evaluation."""
    return [[Task(Kind.FORWARD, stage, m) for m in range(num_microbatches)] for stage in range(num_stages)]


ScheduleFunction: TypeAlias = Callable[[int, int, Rematerialize], Schedule]
"""(K, M, what is recomputed) -> the tasks of a training step."""

SCHEDULES: dict[str, ScheduleFunction] = {"gpipe": gpipe}


def dependencies(task: Task, num_stages: int) -> list[Task]:
    """Return the tasks of other stages that must be done before `task`.

    Within a stage the order of the list decides: a forward comes before its recomputation, that before its backward.
    """
    kind, stage, micro_batch = task
    if kind is Kind.FORWARD and stage > 0:
        return [Task(Kind.FORWARD, stage - 1, micro_batch)]
    if kind is Kind.BACKWARD and stage < num_stages - 1:
        return [Task(Kind.BACKWARD, stage + 1, micro_batch)]
    return []


def sequential(schedule: Schedule) -> list[Task]:
    """Return one order of all stages' tasks, for a process that plays all stages.

    The stages take turns, as they would in time. A recomputation waits until its backward can follow at once: one
    process gains nothing by recomputing early, and so it never holds the activations of two stages.
    """
    num_stages = len(schedule)
    positions = [0] * num_stages
    done: set[Task] = set()
    order: list[Task] = []
    total = sum(len(tasks) for tasks in schedule)
    while len(order) < total:
        ready = []
        for tasks, position in zip(schedule, positions, strict=True):
            batch = _next_tasks(tasks, position)
            if batch and all(needed in done for task in batch for needed in dependencies(task, num_stages)):
                ready.append(batch)
        if not ready:
            raise ValueError("the schedule cannot proceed: every stage waits for a task that no stage will run")
        for batch in ready:
            positions[batch[0].stage] += len(batch)
            order.extend(batch)
        done.update(task for batch in ready for task in batch)
    return order


def _next_tasks(tasks: Sequence[Task], position: int) -> Sequence[Task]:
    """Return the task at a position, together with its backward where it is a recomputation."""
    if position == len(tasks):
        return []
    return tasks[position : position + (2 if tasks[position].kind is Kind.RECOMPUTE else 1)]
