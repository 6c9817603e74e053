"""The tasks of a step, device by device: the engine executes them, the simulator times them, the plots draw them.

A device is what works on its own: a process, or a GPU. It has one stage. In an interleaved schedule of P devices it has
several: stage s is on device s % P. A device runs its tasks in the order of its list, each as soon as the tasks that it
depends on are done. Both ends of a boundary see the micro-batches in the same order.

In the drawings F is a forward, R a recomputation, B a backward. A column is a moment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple, TypeAlias


class Kind(StrEnum):
    """What a task does with a micro-batch."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


class Rematerialize(StrEnum):
    """Which micro-batches drop their activations after the forward pass and recompute them for the backward pass."""

    ALWAYS = "always"
    EXCEPT_LAST = "except_last"  # keep one whose backward is its device's next task: the last one in GPipe
    NEVER = "never"


class Task(NamedTuple):
    """One unit of work of one stage."""

    kind: Kind
    stage: int
    micro_batch: int


CANNOT_PROCEED = "the schedule cannot proceed: every device waits for a task that no device will run"

StepSchedule: TypeAlias = list[list[Task]]
"""The ordered tasks of each device."""


def gpipe(
    num_stages: int,
    num_microbatches: int,
    rematerialize: Rematerialize = Rematerialize.ALWAYS,
    stages_per_device: int = 1,
) -> StepSchedule:
    """Return GPipe's schedule: all forwards, then all backwards in reverse order (section 2.2).

        stage 0   F0 F1 F2        R2 . B2 R1 . B1 R0 . B0
        stage 1      F0 F1 F2   R2 B2 R1 . B1 R0 . B0
        stage 2         F0 F1 F2 R2 B2 R1 B1 R0 B0

    A recomputation comes before its backward and needs no gradient: it runs while the gradient is awaited.
    """
    check_stages_per_device("gpipe", num_stages, stages_per_device)
    schedule = inference(num_stages, num_microbatches)
    for stage, tasks in enumerate(schedule):
        tasks += [Task(Kind.BACKWARD, stage, micro_batch) for micro_batch in reversed(range(num_microbatches))]
    return [_with_recomputations(tasks, rematerialize) for tasks in schedule]


def one_forward_one_backward(
    num_stages: int,
    num_microbatches: int,
    rematerialize: Rematerialize = Rematerialize.ALWAYS,
    stages_per_device: int = 1,
) -> StepSchedule:
    """Return 1F1B: once a stage can run a backward, it alternates forwards and backwards (PipeDream-flush).

        stage 0   F0 F1 F2 R0       B0 F3 R1 B1 R2    B2 R3    B3
        stage 1      F0 F1 R0    B0 F2 R1 B1 F3 R2 B2 R3    B3
        stage 2         F0 R0 B0 F1 R1 B1 F2 R2 B2 F3 R3 B3

    The bubble is GPipe's, but stage k holds at most K - k micro-batches instead of M (Narayanan et al., 2021,
    "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.1).
    """
    check_stages_per_device("1f1b", num_stages, stages_per_device)
    return _in_turns(num_stages, num_microbatches, rematerialize, num_devices=num_stages, eagerness=1)


def interleaved_one_forward_one_backward(
    num_stages: int,
    num_microbatches: int,
    rematerialize: Rematerialize = Rematerialize.ALWAYS,
    stages_per_device: int = 2,
) -> StepSchedule:
    """Return interleaved 1F1B: with v stages per device, the bubble is v times smaller (the same paper, section 2.2.2).

    K = 4 stages on P = 2 devices, M = 4, no recomputation; small letters are the devices' second stages, 2 and 3:

        device 0   F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1    b2    b3 B2 B3
        device 1      F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3

    Micro-batches go in rounds of at most P: each device runs a round through its first stage, then through its second.
    Where M is not a multiple of P, the last round is smaller, and a device runs fewer forwards ahead. With Megatron's
    number, which assumes full rounds, devices would wait for each other for ever.
    """
    check_stages_per_device("interleaved_1f1b", num_stages, stages_per_device)
    num_devices = num_stages // stages_per_device
    # Running ahead hides the time of the transfers, and takes memory.
    eagerness = 2 if num_microbatches % num_devices == 0 else 1
    return _in_turns(num_stages, num_microbatches, rematerialize, num_devices=num_devices, eagerness=eagerness)


def inference(num_stages: int, num_microbatches: int, stages_per_device: int = 1) -> StepSchedule:
    """Return the forwards alone, for evaluation."""
    num_devices = num_stages // stages_per_device
    return [
        _in_rounds(Kind.FORWARD, range(device, num_stages, num_devices), num_microbatches, num_devices)
        for device in range(num_devices)
    ]


ScheduleFunction: TypeAlias = Callable[[int, int, Rematerialize, int], StepSchedule]
"""(K, M, what is recomputed, stages per device) -> the tasks of a training step."""

SCHEDULES: dict[str, ScheduleFunction] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved_1f1b": interleaved_one_forward_one_backward,
}


def choose_schedule(
    schedule: str | ScheduleFunction,
    num_stages: int,
    num_microbatches: int,
    rematerialize: Rematerialize,
    stages_per_device: int,
) -> ScheduleFunction:
    """Return the schedule of a name, or a user's own after a look at its tasks.

    Raises:
        ValueError: there is no such schedule, it cannot have so many stages per device, or its tasks are not right.
    """
    if not isinstance(schedule, str):
        _check_stages_divide(num_stages, stages_per_device)
        check_schedule(
            schedule(num_stages, num_microbatches, rematerialize, stages_per_device),
            num_stages,
            num_microbatches,
            stages_per_device,
        )
        return schedule
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; it must be one of {', '.join(SCHEDULES)}, or a function")
    check_stages_per_device(schedule, num_stages, stages_per_device)
    return SCHEDULES[schedule]


def check_schedule(schedule: StepSchedule, num_stages: int, num_microbatches: int, stages_per_device: int) -> None:
    """Refuse tasks that no engine could run, or that leave something out.

    Raises:
        ValueError: naming the first stage and micro-batch.
    """
    num_devices = num_stages // stages_per_device
    if len(schedule) != num_devices:
        raise ValueError(f"the schedule has the tasks of {len(schedule)} devices; {num_devices} were expected")
    kinds: dict[tuple[int, int], list[Kind]] = {(k, m): [] for k in range(num_stages) for m in range(num_microbatches)}
    for device, tasks in enumerate(schedule):
        for kind, stage, micro_batch in tasks:
            if (stage, micro_batch) not in kinds or stage % num_devices != device:
                raise ValueError(
                    f"the schedule has a {kind} of stage {stage}, micro-batch {micro_batch} on device {device}; "
                    f"stage s of {num_stages} belongs to device s % {num_devices}, and micro-batches to 0 ... "
                    f"{num_microbatches - 1}"
                )
            kinds[stage, micro_batch].append(kind)
    whole = [Kind.FORWARD, Kind.BACKWARD], [Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD]
    for (stage, micro_batch), found in kinds.items():
        if found not in whole:
            raise ValueError(
                f"the schedule has {', '.join(found) or 'nothing'} for stage {stage}, micro-batch {micro_batch}; it "
                "must be forward, perhaps recompute, and backward, each once and in this order"
            )
    for stage in range(num_stages - 1):
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            here, there = (
                [task.micro_batch for task in schedule[k % num_devices] if (task.kind, task.stage) == (kind, k)]
                for k in (stage, stage + 1)
            )
            if here != there:
                raise ValueError(
                    f"the schedule runs the {kind}s of stage {stage} in the order of micro-batches {here}, and those "
                    f"of stage {stage + 1} in the order {there}; both ends of a boundary need the same"
                )
    sequential(schedule)


def _check_stages_divide(num_stages: int, stages_per_device: int) -> None:
    if stages_per_device < 1 or num_stages % stages_per_device != 0:
        raise ValueError(
            f"{num_stages} partitions cannot be shared evenly by devices with stages_per_device={stages_per_device}; "
            "make them a multiple of stages_per_device"
        )


def check_stages_per_device(schedule: str, num_stages: int, stages_per_device: int) -> None:
    """Refuse a number of stages per device that a schedule cannot have.

    Raises:
        ValueError: interleaving needs at least 2, which divide K; the other schedules need 1.
    """
    if schedule != "interleaved_1f1b":
        if stages_per_device != 1:
            raise ValueError(
                f"stages_per_device is {stages_per_device}, but the schedule {schedule} has one stage per device; "
                "make it 1, or use the schedule interleaved_1f1b"
            )
    elif stages_per_device < 2:
        raise ValueError(
            f"stages_per_device is {stages_per_device}, but the schedule interleaved_1f1b needs at least 2; raise it, "
            "or use the schedule 1f1b"
        )
    else:
        _check_stages_divide(num_stages, stages_per_device)


def _in_turns(
    num_stages: int, num_microbatches: int, rematerialize: Rematerialize, *, num_devices: int, eagerness: int
) -> StepSchedule:
    """Return some forwards of each device, then forwards and backwards alternately, then the remaining backwards.

    The last device runs ahead through all its stages but one; each device before it runs `eagerness` forwards more.
    """
    schedule = []
    for device in range(num_devices):
        stages = range(device, num_stages, num_devices)
        forwards = _in_rounds(Kind.FORWARD, stages, num_microbatches, num_devices)
        backwards = _in_rounds(Kind.BACKWARD, stages[::-1], num_microbatches, num_devices)
        ahead = (len(stages) - 1) * num_devices + eagerness * (num_devices - 1 - device)
        tasks = forwards[:ahead]
        for position, backward in enumerate(backwards, ahead):
            tasks += [*forwards[position : position + 1], backward]
        schedule.append(_with_recomputations(tasks, rematerialize))
    return schedule


def _in_rounds(kind: Kind, stages: Iterable[int], num_microbatches: int, num_devices: int) -> list[Task]:
    """Return a device's tasks of one kind: rounds of one micro-batch per device, each through all stages in turn."""
    return [
        Task(kind, stage, micro_batch)
        for first in range(0, num_microbatches, num_devices)
        for stage in stages
        for micro_batch in range(first, min(first + num_devices, num_microbatches))
    ]


def _with_recomputations(tasks: list[Task], rematerialize: Rematerialize) -> list[Task]:
    """Insert a recomputation directly before each backward that needs one; a device's first task is a forward."""
    if rematerialize is Rematerialize.NEVER:
        return tasks
    found = tasks[:1]
    for before, task in pairwise(tasks):
        follows = before == Task(Kind.FORWARD, task.stage, task.micro_batch)
        if task.kind is Kind.BACKWARD and not (follows and rematerialize is Rematerialize.EXCEPT_LAST):
            found.append(Task(Kind.RECOMPUTE, task.stage, task.micro_batch))
        found.append(task)
    return found


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
    if kind is Kind.BACKWARD and stage < num_stages - 1:
        return [Task(Kind.BACKWARD, stage + 1, micro_batch)]
    return []


def sequential(schedule: StepSchedule) -> list[Task]:
    """Return one order of all stages' tasks, for a process that plays all stages.

    The devices take turns, as they would in time. A recomputation waits until its backward can follow at once. One
    process gains nothing by recomputing early, and so never holds two recomputed graphs.

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
            raise ValueError(CANNOT_PROCEED)
        for device, batch in ready:
            positions[device] += len(batch)
            order.extend(batch)
            done.update(batch)
    return order


def _next_tasks(tasks: Sequence[Task], position: int) -> Sequence[Task]:
    """Return the task at a position; a recomputation comes with its backward."""
    if position == len(tasks):
        return []
    return tasks[position : position + (2 if tasks[position].kind is Kind.RECOMPUTE else 1)]


# A step is planned once per size: behind the first stage, nothing else can be done before the first boundary input has
# arrived, and all stages after it wait for that too.
@functools.lru_cache(maxsize=64)
def plan_tasks(
    schedule: ScheduleFunction | None,
    num_stages: int,
    num_microbatches: int,
    rematerialize: Rematerialize,
    stages_per_device: int,
    stages: tuple[int, ...],
) -> tuple[list[Task], set[tuple[int, int]], dict[int, int]]:
    """Return a process's tasks, each (stage, micro-batch) that it recomputes, and each stage's last micro-batch.

    `stages` are those of one device, or all. Without a schedule the tasks are the forwards alone.
    """
    if schedule is None:
        found = inference(num_stages, num_microbatches, stages_per_device)
    else:
        found = schedule(num_stages, num_microbatches, rematerialize, stages_per_device)
        if schedule not in SCHEDULES.values():
            check_schedule(found, num_stages, num_microbatches, stages_per_device)
    tasks = sequential(found) if len(stages) == num_stages else found[min(stages)]  # device s has stage s
    recomputed = {(task.stage, task.micro_batch) for task in tasks if task.kind is Kind.RECOMPUTE}
    return tasks, recomputed, {task.stage: task.micro_batch for task in tasks if task.kind is Kind.BACKWARD}
