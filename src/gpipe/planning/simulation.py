"""When each task of a step would run: a schedule, played with given times."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable

from gpipe.pipeline.schedule import StepSchedule, Task, cannot_proceed, count_stages, dependencies
from gpipe.pipeline.timeline import Event, Timeline


def simulate(
    schedule: StepSchedule,
    seconds: Callable[[Task], float],
    transfer_seconds: Callable[[Task], float] = lambda _: 0.0,
    link: Callable[[Task], Hashable] = lambda task: (task.kind.direction, task.stage),
) -> Timeline:
    """Return when each task of a schedule runs if only tasks and transfers take time.

    Args:
        schedule: the tasks of each device, in order.
        seconds: how long a task takes.
        transfer_seconds: how long its result travels to the device that waits for it, over a free link.
        link: which link the result travels over. A link carries one result at a time, first come, first served. By
            default each direction of each boundary has its own; with `lambda _: "bus"` all of them share one.

    Raises:
        ValueError: a task waits for one that never runs.
    """
    num_devices, num_stages = len(schedule), count_stages(schedule)
    placement = {task.stage: device for device, tasks in enumerate(schedule) for task in tasks}
    needs = [[dependencies(task, num_stages) for task in tasks] for tasks in schedule]
    travelling = {needed for tasks in needs for task in tasks for needed in task}
    free: dict[Hashable, float] = {}  # links, and since when
    arrivals: dict[Task, float] = {}  # of results, where they are waited for
    since = [0.0] * num_devices  # when each device ended its last task
    positions = [0] * num_devices
    blocked: dict[Task, int] = {}  # results that are not there yet, and the devices that wait for them
    running: list[tuple[float, int]] = []  # a heap of the tasks' ends, with the devices
    events: list[Event] = []
    idle = list(range(num_devices))  # devices whose next task may be able to run
    while idle or running:
        for device in idle:
            if positions[device] == len(schedule[device]):
                continue
            needed = needs[device][positions[device]]
            missing = next((other for other in needed if other not in arrivals), None)
            if missing is not None:
                blocked[missing] = device
                continue
            task = schedule[device][positions[device]]
            start = max([since[device], *(arrivals[other] for other in needed)])
            events.append(Event(task, start, start + seconds(task)))
            heapq.heappush(running, (events[-1].end, device))
        if not running:
            break
        end, device = heapq.heappop(running)
        task = schedule[device][positions[device]]
        idle = [device]
        since[device] = end
        positions[device] += 1
        if task in travelling:
            arrivals[task] = end
            neighbour = task.stage + (-1 if task.kind.makes_gradients else 1)
            if placement[task.stage] != placement[neighbour]:
                key = link(task)
                arrivals[task] = free[key] = max(free.get(key, 0.0), end) + transfer_seconds(task)
            if task in blocked:
                idle.append(blocked.pop(task))
    if blocked:
        raise cannot_proceed(schedule, positions, arrivals)
    return Timeline(tuple(events), num_devices, tuple(placement[stage] for stage in range(num_stages)))
