"""The tasks of a step, device by device: the engine executes them, the simulator times them, the plots draw them.

A device is a process or a GPU that works on its own. It has one or more stages, which its tasks name. It runs its tasks
in the order of its list, each as soon as the tasks that it depends on are done. Both ends of a boundary see the
micro-batches in the same order.

In the drawings F is a forward, R a recomputation, B a backward. A column is a moment. This file has GPipe's schedule;
schedules/ has those that alternate forwards and backwards, and those that split backwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple, TypeAlias


class Kind(StrEnum):
    """What a task does with a micro-batch."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    INPUT_GRADIENTS = "input_gradients"  # the part of a backward that the stage before waits for
    WEIGHT_GRADIENTS = "weight_gradients"  # the other part

    # Attributes, not properties: they are read several times per task.
    makes_gradients: bool  # whether it makes gradients for the stage before
    direction: Kind  # where its result travels: FORWARD to the next stage, BACKWARD to the one before
    words: str  # its name in a sentence

    def __init__(self, value: str) -> None:
        self.makes_gradients = value in ("backward", "input_gradients")
        self.words = value.replace("_", " ")


for _kind in Kind:
    _kind.direction = Kind.BACKWARD if _kind.makes_gradients else Kind.FORWARD


class Rematerialize(StrEnum):
    """Which micro-batches drop their activations after the forward pass and recompute them for the backward pass."""

    ALWAYS = "always"
    EXCEPT_LAST = "except_last"  # keep those whose backward directly follows their forward: in GPipe, the last one
    NEVER = "never"


Rematerialization: TypeAlias = Rematerialize | tuple[int, ...]
"""A mode; or, for each stage, how many micro-batches' graphs it keeps at once. The others are recomputed."""


class Task(NamedTuple):
    """One unit of work of one stage."""

    kind: Kind
    stage: int
    micro_batch: int


StepSchedule: TypeAlias = list[list[Task]]
"""The ordered tasks of each device."""


def gpipe(
    num_stages: int,
    num_microbatches: int,
    rematerialize: Rematerialization = Rematerialize.ALWAYS,
    stages_per_device: int = 1,
) -> StepSchedule:
    """Return GPipe's schedule: all forwards, then all backwards in reverse order (section 2.2).

        stage 0   F0 F1 F2 R2             B2 R1 B1 R0 B0
        stage 1      F0 F1 F2 R2       B2 R1 B1 R0 B0
        stage 2         F0 F1 F2 R2 B2 R1 B1 R0 B0

    A recomputation comes before its backward and needs no gradient: it runs while the gradient is awaited.
    """
    check_stages_per_device("gpipe", num_stages, stages_per_device)
    schedule = inference(range(num_stages), num_microbatches)
    for stage, tasks in enumerate(schedule):
        tasks += [Task(Kind.BACKWARD, stage, micro_batch) for micro_batch in reversed(range(num_microbatches))]
    return [with_recomputations(tasks, rematerialize) for tasks in schedule]


def inference(placement: Sequence[int], num_microbatches: int) -> StepSchedule:
    """Return the forwards alone, for evaluation; `placement` is the device of each stage."""
    num_devices = max(placement) + 1
    stages = [[stage for stage, place in enumerate(placement) if place == device] for device in range(num_devices)]
    return [in_rounds(Kind.FORWARD, own, num_microbatches, num_devices) for own in stages]


ScheduleFunction: TypeAlias = Callable[[int, int, Rematerialization, int], StepSchedule]
"""(K, M, what is recomputed, stages per device) -> the tasks of a training step."""


def check_stages_divide(num_stages: int, stages_per_device: int) -> None:
    """Refuse stages that devices cannot share evenly."""
    if stages_per_device < 1 or num_stages % stages_per_device != 0:
        raise ValueError(
            f"{num_stages} partitions cannot be shared evenly by devices with stages_per_device={stages_per_device}; "
            "choose a multiple of stages_per_device"
        )


def check_stages_per_device(schedule: str, num_stages: int, stages_per_device: int) -> None:
    """Refuse a number of stages per device that a schedule cannot have.

    Raises:
        ValueError: interleaving needs at least 2, ZB-V needs 2, the other schedules 1; and it must divide K.
    """
    least, most, needed = _STAGES_PER_DEVICE.get(schedule, (1, 1, "1"))
    if not least <= stages_per_device <= most:
        raise ValueError(
            f"stages_per_device is {stages_per_device}, but the schedule {schedule} needs {needed}; change it, or use "
            "another schedule: zb_v needs 2, interleaved_1f1b 2 or more, the others 1"
        )
    check_stages_divide(num_stages, stages_per_device)


_STAGES_PER_DEVICE = {"zb_v": (2, 2, "2"), "interleaved_1f1b": (2, math.inf, "2 or more")}


def in_rounds(kind: Kind, stages: Iterable[int], num_microbatches: int, num_devices: int) -> list[Task]:
    """Return a device's tasks of one kind: rounds of one micro-batch per device, each through all stages in turn."""
    return [
        Task(kind, stage, micro_batch)
        for first in range(0, num_microbatches, num_devices)
        for stage in stages
        for micro_batch in range(first, min(first + num_devices, num_microbatches))
    ]


def with_recomputations(tasks: Sequence[Task], rematerialize: Rematerialization) -> list[Task]:
    """Return a device's tasks with a recomputation directly before each backward that needs one."""
    kept = _find_kept(tasks, rematerialize)
    found: list[Task] = []
    for task in tasks:
        if task.kind.makes_gradients and (task.stage, task.micro_batch) not in kept:
            found.append(Task(Kind.RECOMPUTE, task.stage, task.micro_batch))
        found.append(task)
    return found


def _find_kept(tasks: Sequence[Task], rematerialize: Rematerialization) -> set[tuple[int, int]]:
    """Return each (stage, micro-batch) whose forward keeps its graph; `tasks` are a device's, without recomputations.

    With a number per stage: whenever a stage would keep one too many, it drops the one whose backward comes last. No
    other choice keeps more in total (Carlisle and Lloyd, 1995, "On the k-coloring of intervals").
    """
    if rematerialize is Rematerialize.ALWAYS:
        return set()
    if rematerialize is Rematerialize.NEVER:
        return {(task.stage, task.micro_batch) for task in tasks}
    if rematerialize is Rematerialize.EXCEPT_LAST:
        return {
            (task.stage, task.micro_batch)
            for before, task in pairwise(tasks)
            if task.kind.makes_gradients and before == Task(Kind.FORWARD, task.stage, task.micro_batch)
        }
    ends = {
        (task.stage, task.micro_batch): position for position, task in enumerate(tasks) if task.kind.makes_gradients
    }
    held: dict[int, set[tuple[int, int]]] = {}
    kept: set[tuple[int, int]] = set()
    for task in tasks:
        run, own = (task.stage, task.micro_batch), held.setdefault(task.stage, set())
        if task.kind is Kind.FORWARD:
            own.add(run)
            if len(own) > rematerialize[task.stage]:
                own.remove(max(own, key=ends.__getitem__))
        elif task.kind.makes_gradients and run in own:
            own.remove(run)
            kept.add(run)
    return kept


def count_stages(schedule: StepSchedule) -> int:
    """Return K."""
    return 1 + max(task.stage for tasks in schedule for task in tasks)


def name_stages(stages: Iterable[int]) -> str:
    """Return "stage 1", or "stages 1, 3"."""
    numbers = [str(stage) for stage in stages]
    return f"stage{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def dependencies(task: Task, num_stages: int) -> list[Task]:
    """Return the tasks of other stages that must be done before `task`; within a stage the list's order decides."""
    kind, stage, micro_batch = task
    if kind is Kind.FORWARD and stage > 0:
        return [Task(Kind.FORWARD, stage - 1, micro_batch)]
    if kind.makes_gradients and stage < num_stages - 1:
        return [Task(kind, stage + 1, micro_batch)]
    return []


def cannot_proceed(schedule: StepSchedule, positions: Sequence[int], done: Container[Task]) -> ValueError:
    """Return the error for a schedule whose devices all wait: it names one task, and the one that it needs.

    Args:
        schedule: the tasks of each device.
        positions: how many tasks each device has run.
        done: the tasks that have run.
    """
    num_stages = count_stages(schedule)
    device, task, needed = next(
        (device, task, needed)
        for device, tasks in enumerate(schedule)
        for task in tasks[positions[device] :]
        for needed in dependencies(task, num_stages)
        if needed not in done
    )
    first, other = (f"{one.kind.value} for stage {one.stage}, micro-batch {one.micro_batch}" for one in (task, needed))
    return ValueError(
        "the schedule cannot proceed: every device waits for a task that no device will run; on device "
        f"{device}, {first}, needs {other}: schedule that earlier on its device"
    )


def sequential(schedule: StepSchedule) -> list[Task]:
    """Return all devices' tasks in one order, for a process that plays all stages.

    The devices take turns, as they would in time. A recomputation waits until its backward can follow at once: one
    process gains nothing by recomputing early, and this way it never holds two recomputed graphs.

    Raises:
        ValueError: a task waits for one that never runs.
    """
    num_stages = count_stages(schedule)
    positions = [0] * len(schedule)
    done: set[Task] = set()
    order: list[Task] = []
    total = sum(len(tasks) for tasks in schedule)
    while len(order) < total:
        ready = []
        for device, tasks in enumerate(schedule):
            batch = _next_tasks(tasks, positions[device])
            if batch and all(needed in done for task in batch for needed in dependencies(task, num_stages)):
                ready.append((device, batch))
        if not ready:
            raise cannot_proceed(schedule, positions, done)
        for device, batch in ready:
            positions[device] += len(batch)
            order.extend(batch)
            done.update(batch)
    return order


def _next_tasks(tasks: Sequence[Task], position: int) -> Sequence[Task]:
    """Return the task at a position; a recomputation comes with the one after it, its backward."""
    if position == len(tasks):
        return []
    return tasks[position : position + (2 if tasks[position].kind is Kind.RECOMPUTE else 1)]
