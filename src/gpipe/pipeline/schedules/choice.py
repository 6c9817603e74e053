"""A pipeline's schedule, chosen by name or checked if it is a user's own, and the tasks of each process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

from gpipe.pipeline.schedule import (
    Kind,
    Rematerialization,
    Rematerialize,
    ScheduleFunction,
    StepSchedule,
    Task,
    check_stages_divide,
    gpipe,
    inference,
    sequential,
)
from gpipe.pipeline.schedules.one_forward_one_backward import (
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
)
from gpipe.pipeline.schedules.zero_bubble import split_gpipe, zero_bubble_h1, zero_bubble_v

SCHEDULES: dict[str, ScheduleFunction] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved_1f1b": interleaved_one_forward_one_backward,
    "split_gpipe": split_gpipe,
    "zb_h1": zero_bubble_h1,
    "zb_v": zero_bubble_v,
}

SPLIT_SCHEDULES = frozenset(("split_gpipe", "zb_h1", "zb_v"))
"""The schedules that split backwards in two."""

StepPlan: TypeAlias = tuple[list[Task], set[tuple[int, int]], dict[int, int]]
"""A process's tasks, each (stage, micro-batch) that it recomputes, and each stage's last micro-batch."""

_WHOLE = [
    [Kind.FORWARD, *recomputation, *backward]
    for recomputation in ([], [Kind.RECOMPUTE])
    for backward in ([Kind.BACKWARD], [Kind.INPUT_GRADIENTS, Kind.WEIGHT_GRADIENTS])
]


def place_stages(schedule: str, num_stages: int, stages_per_device: int) -> tuple[int, ...]:
    """Return the device of each stage in a named schedule.

    Raises:
        ValueError: there is no such schedule, or it cannot have this number of stages per device.
    """
    return choose_schedule(schedule, num_stages, 1, Rematerialize.NEVER, stages_per_device)[1]


def choose_schedule(
    schedule: str | ScheduleFunction,
    num_stages: int,
    num_microbatches: int,
    rematerialize: Rematerialization,
    stages_per_device: int,
) -> tuple[ScheduleFunction, tuple[int, ...]]:
    """Return the named schedule, or a user's own after checking its tasks; and the device of each stage.

    Raises:
        TypeError: a user's own returns something other than lists of tasks.
        ValueError: there is no such schedule, it cannot have this number of stages per device, or its tasks are wrong.
    """
    if isinstance(schedule, str) and schedule in SCHEDULES:
        function = SCHEDULES[schedule]
        tasks = function(num_stages, 1, Rematerialize.NEVER, stages_per_device)
    elif callable(schedule):
        check_stages_divide(num_stages, stages_per_device)
        function = functools.partial(schedule)  # hashable, even if the schedule is not
        tasks = function(num_stages, num_microbatches, rematerialize, stages_per_device)
        check_schedule(tasks, num_stages, num_microbatches, stages_per_device)
    else:
        raise ValueError(f"schedule is {schedule!r}; it must be one of {', '.join(SCHEDULES)}, or a function")
    placement = {task.stage: device for device, own in enumerate(tasks) for task in own}
    return function, tuple(placement[stage] for stage in range(num_stages))


# A step is planned once per size: after the first stage, a process cannot plan before its first boundary input arrives,
# and all stages after it wait meanwhile.
@functools.lru_cache(maxsize=64)
def plan_tasks(
    schedule: ScheduleFunction | None,
    num_stages: int,
    num_microbatches: int,
    rematerialize: Rematerialization,
    stages_per_device: int,
    placement: tuple[int, ...],
    device: int | None,
) -> StepPlan:
    """Return a process's tasks, each (stage, micro-batch) that it recomputes, and each stage's last micro-batch.

    The last one is the one whose gradients of weights are made last.

    device: that of the process; None: it plays all. Without a schedule, the tasks are the forwards alone.
    """
    if schedule is None:
        found = inference(placement, num_microbatches)
    else:
        found = schedule(num_stages, num_microbatches, rematerialize, stages_per_device)
        if schedule not in SCHEDULES.values():
            check_schedule(found, num_stages, num_microbatches, stages_per_device)
    tasks = sequential(found) if device is None else found[device]
    recomputed = {(task.stage, task.micro_batch) for task in tasks if task.kind is Kind.RECOMPUTE}
    last = {task.stage: task.micro_batch for task in tasks if task.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENTS)}
    return tasks, recomputed, last


def check_schedule(schedule: StepSchedule, num_stages: int, num_microbatches: int, stages_per_device: int) -> None:
    """Refuse tasks that no engine could run, or that leave something out.

    Raises:
        TypeError: they are not lists of tasks.
        ValueError: names the first stage and micro-batch that is wrong.
    """
    num_devices = num_stages // stages_per_device
    rows = schedule if isinstance(schedule, Sequence) else [None]
    if not all(
        isinstance(own, Sequence) and all(isinstance(task, Task) and isinstance(task.kind, Kind) for task in own)
        for own in rows
    ):
        raise TypeError(
            f"the schedule returned {schedule!r:.80}; it must be a list with a list of tasks "
            "(gpipe.pipeline.schedule.Task, with a Kind) per device"
        )
    if len(schedule) != num_devices:
        raise ValueError(f"the schedule has the tasks of {len(schedule)} devices; {num_devices} were expected")
    tasks: dict[tuple[int, int], list[Task]] = {(k, m): [] for k in range(num_stages) for m in range(num_microbatches)}
    placement: dict[int, int] = {}
    for device, own in enumerate(schedule):
        for task in own:
            if (task.stage, task.micro_batch) not in tasks or placement.setdefault(task.stage, device) != device:
                raise ValueError(
                    f"the schedule has a {task.kind.words} of stage {task.stage}, micro-batch {task.micro_batch} on "
                    f"device {device}; each of the {num_stages} stages belongs to one device, and micro-batches are "
                    f"0 ... {num_microbatches - 1}"
                )
            tasks[task.stage, task.micro_batch].append(task)
    for (stage, micro_batch), found in tasks.items():
        if [task.kind for task in found] not in _WHOLE:
            raise ValueError(
                f"the schedule has {', '.join(task.kind.words for task in found) or 'nothing'} for stage {stage}, "
                f"micro-batch {micro_batch}; it must be forward, optionally recompute, and backward (or input "
                "gradients and weight gradients), each once and in this order"
            )
    exchanges: list[list[tuple[Kind, int]]] = []  # of each stage with its neighbours: forwards, then backwards
    for stage in range(num_stages):
        order = [(task.kind, task.micro_batch) for task in schedule[placement[stage]] if task.stage == stage]
        split = [micro_batch for kind, micro_batch in order if kind is Kind.INPUT_GRADIENTS]
        weights = [micro_batch for kind, micro_batch in order if kind is Kind.WEIGHT_GRADIENTS]
        if weights != split:
            raise ValueError(
                f"the schedule makes the weight gradients of stage {stage} in the order of micro-batches {weights}, "
                f"and the input gradients in the order {split}; they must be the same"
            )
        forwards = [row for row in order if row[0] is Kind.FORWARD]
        exchanges.append(forwards + [row for row in order if row[0].makes_gradients])
        if exchanges[stage] != exchanges[max(stage - 1, 0)]:
            here, there = ([micro_batch for _, micro_batch in exchanges[k]] for k in (stage - 1, stage))
            raise ValueError(
                f"the schedule runs the forwards and backwards of stage {stage - 1} in the order of micro-batches "
                f"{here}, and those of stage {stage} in the order {there}, or splits different ones; both ends of a "
                "boundary need the same"
            )
    per_device = [list(placement.values()).count(device) for device in range(num_devices)]
    if set(per_device) != {stages_per_device}:
        raise ValueError(f"the devices of the schedule have {per_device} stages; each needs {stages_per_device}")
    sequential(schedule)


def name_schedule(schedule: str | ScheduleFunction) -> str:
    """Return the name of a schedule, the same in each process; of a functools.partial, that of its function."""
    if isinstance(schedule, str):
        return schedule
    function = getattr(schedule, "func", schedule)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None)}.{name}"


def check_rematerialization(value: str | Sequence[int], num_stages: int) -> Rematerialization:
    """Return the named mode, or the number of micro-batches whose graphs each stage keeps.

    Raises:
        ValueError: it is neither.
    """
    names = [str(choice) for choice in Rematerialize]
    if isinstance(value, str) and value in names:
        return Rematerialize(value)
    numbers: tuple[Any, ...] = tuple(value) if isinstance(value, Sequence) else ()
    if len(numbers) == num_stages and all(type(number) is int and number >= 0 for number in numbers):
        return numbers
    raise ValueError(
        f"rematerialize is {value!r}; it must be one of {', '.join(names)}, or {num_stages} whole numbers, one per "
        "stage: of how many micro-batches it keeps the activations at once"
    )
