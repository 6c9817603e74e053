"""When each task of a step would run: a schedule, simulated with given times."""

from __future__ import annotations

from collections.abc import Callable

from gpipe.pipeline.schedule import Kind, StepSchedule, Task, cannot_proceed, count_stages, dependencies
from gpipe.pipeline.timeline import Event, Timeline


def simulate(
    schedule: StepSchedule,
    seconds: Callable[[Task], float],
    transfer_seconds: Callable[[Task], float] = lambda _: 0.0,
) -> Timeline:
    """Return when each task of a schedule runs if only tasks and transfers take time.

    Args:
        schedule: the tasks of each device, in order.
        seconds: how long a task takes.
        transfer_seconds: how long its result takes to the device that waits for it. Each direction of each boundary has
            its own link, which carries one result at a time.

    Raises:
        ValueError: a task waits for one that never runs.
    """
    return Simulation(schedule)(seconds, transfer_seconds)


class Simulation:
    """A schedule that is simulated many times, as `simulate` does: what each task waits for is looked up once."""

    def __init__(self, schedule: StepSchedule) -> None:
        num_stages = count_stages(schedule)
        devices: dict[int | None, int] = {task.stage: device for device, tasks in enumerate(schedule) for task in tasks}
        self._num_devices, self._placement = len(schedule), tuple(devices[stage] for stage in range(num_stages))
        # Each task with its device, the tasks whose results it needs, and the link that carries its own. It comes after
        # the tasks that it needs and after the earlier ones of its device, so links carry results in order.
        self._tasks: list[tuple[Task, int, tuple[int, ...], int | None]] = []
        numbers: dict[Task, int] = {}
        links: dict[tuple[int, int | None], int] = {}  # from one stage to another
        positions = [0] * len(schedule)
        waiting: dict[Task, int] = {}  # devices, by the task that they wait for
        ready = list(range(len(schedule)))
        while ready:
            device = ready.pop()
            for task in schedule[device][positions[device] :]:
                needed = dependencies(task, num_stages)
                missing = next((other for other in needed if other not in numbers), None)
                if missing is not None:
                    waiting[missing] = device
                    break
                link = None
                if (neighbour := _find_receiver(task)) in devices and devices[neighbour] != device:
                    link = links.setdefault((task.stage, neighbour), len(links))
                numbers[task] = len(self._tasks)
                self._tasks.append((task, device, tuple(numbers[other] for other in needed), link))
                positions[device] += 1
                if task in waiting:
                    ready.append(waiting.pop(task))
        if waiting:
            raise cannot_proceed(schedule, positions, numbers)
        self._num_links = len(links)

    def __call__(self, seconds: Callable[[Task], float], transfer_seconds: Callable[[Task], float]) -> Timeline:
        """Return when each task runs; the arguments are those of `simulate`."""
        since = [0.0] * self._num_devices  # when each device ended its last task
        free = [0.0] * self._num_links
        arrivals: list[float] = []  # when each result arrives where it is needed
        events: list[Event] = []
        for task, device, needed, link in self._tasks:
            start = since[device]
            for number in needed:
                start = max(start, arrivals[number])
            end = since[device] = start + seconds(task)
            if link is not None:
                free[link] = max(free[link], end) + transfer_seconds(task)
            arrivals.append(end if link is None else free[link])
            events.append(Event(task, start, end))
        return Timeline(tuple(events), self._num_devices, self._placement)


def _find_receiver(task: Task) -> int | None:
    """Return the stage that would wait for a task's result; it may not exist."""
    if task.kind.makes_gradients:
        return task.stage - 1
    return task.stage + 1 if task.kind is Kind.FORWARD else None
