"""When each task of a step would run: a schedule, played with given times."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable

from gpipe.pipeline.schedule import CANNOT_PROCEED, StepSchedule, Task, count_stages, dependencies
from gpipe.pipeline.timeline import Event, Timeline


def simulate(
    schedule: StepSchedule,
    seconds: Callable[[Task], float],
    transfer_seconds: Callable[[Task], float] = lambda _: 0.0,
    link: Callable[[Task], Hashable] = lambda task: (task.kind, task.stage),
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
    free: dict[Hashable, float] = {}  # links, and since when
    travelling = {needed for tasks in schedule for task in tasks for needed in dependencies(task, num_stages)}
    arrivals: dict[Task, float] = {}  # of results, where they are waited for
    waiting = dict.fromkeys(range(num_devices), 0.0)  # devices that run nothing, and since when
    positions = [0] * num_devices
    running: list[tuple[float, int]] = []  # a heap of the tasks' ends, with the devices
    events: list[Event] = []
    while waiting or running:
        for device, since in list(waiting.items()):
            task = schedule[device][positions[device]]
            needed = dependencies(task, num_stages)
            if all(other in arrivals for other in needed):
                start = max([since, *(arrivals[other] for other in needed)])
                events.append(Event(task, start, start + seconds(task)))
                heapq.heappush(running, (events[-1].end, device))
                del waiting[device]
        if not running:
            raise ValueError(CANNOT_PROCEED)
        end, device = heapq.heappop(running)
        task = schedule[device][positions[device]]
        if task in travelling:
            arrivals[task] = end
            if num_devices > 1:
                key = link(task)
                arrivals[task] = free[key] = max(free.get(key, 0.0), end) + transfer_seconds(task)
        positions[device] += 1
        if positions[device] < len(schedule[device]):
            waiting[device] = end
    return Timeline(tuple(events), num_devices)
