"""When each task of a step ran, or would run in a simulation: bubble, picture, Perfetto trace."""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpipe.pipeline.schedule import CANNOT_PROCEED, Kind, StepSchedule, Task, count_stages, dependencies, name_stages

_COLORS = {Kind.FORWARD: "#4878a8", Kind.RECOMPUTE: "#c9a227", Kind.BACKWARD: "#7d9d5b"}


class Event(NamedTuple):
    """A task and when it ran, in seconds since the step began."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The events of one step, of all stages, one row per device: stage s is in row s % P.

    Attributes:
        events: in any order.
        num_devices: P.
    """

    events: tuple[Event, ...]
    num_devices: int

    @property
    def makespan_seconds(self) -> float:
        """Seconds from the first task's start to the last one's end."""
        return max(event.end for event in self.events) - min(event.start for event in self.events)

    def busy_seconds(self, kind: Kind | None = None) -> list[float]:
        """Return the seconds that each device spent in tasks (of one kind)."""
        busy = [0.0] * self.num_devices
        for task, start, end in self.events:
            if kind is None or task.kind is kind:
                busy[self.row(task)] += end - start
        return busy

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they had no task: 1 - busy / (P x makespan)."""
        return 1 - sum(self.busy_seconds()) / (self.num_devices * self.makespan_seconds)

    def row(self, task: Task) -> int:
        """Return the device that ran a task."""
        return task.stage % self.num_devices

    def row_names(self) -> list[str]:
        """Return which stages each device has: "stage 1", or "stages 1, 3"."""
        num_stages = 1 + max(event.task.stage for event in self.events)
        last = max(num_stages, self.num_devices)
        return [name_stages(range(row, last, self.num_devices)) for row in range(self.num_devices)]

    def mean_seconds(self) -> Callable[[Task], float]:
        """Return each task's expected seconds: the mean over the micro-batches of its kind and stage."""
        found: dict[tuple[Kind, int], list[float]] = {}
        for task, start, end in self.events:
            found.setdefault((task.kind, task.stage), []).append(end - start)
        means = {key: sum(values) / len(values) for key, values in found.items()}
        return lambda task: means[task.kind, task.stage]

    def to_json(self) -> list[list[Any]]:
        """Return the events as rows (kind, stage, micro-batch, start, end), by stage and time."""
        ordered = sorted(self.events, key=lambda event: (event.task.stage, event.start))
        return [[str(task.kind), task.stage, task.micro_batch, start, end] for task, start, end in ordered]

    @classmethod
    def from_json(cls, rows: Iterable[Sequence[Any]], num_devices: int) -> Timeline:
        """Read what `to_json` wrote."""
        events = (Event(Task(Kind(kind), stage, m), start, end) for kind, stage, m, start, end in rows)
        return cls(tuple(events), num_devices)

    def write_trace(self, path: Path) -> None:
        """Write a trace in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open."""
        rows: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": name}}
            for row, name in enumerate(self.row_names())
        ]
        rows += [
            {
                "name": f"{task.kind} {task.micro_batch}",
                "cat": str(task.kind),
                "ph": "X",
                "pid": 0,
                "tid": self.row(task),
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
                "args": {"stage": task.stage, "micro_batch": task.micro_batch},
            }
            for task, start, end in self.events
        ]
        path.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))


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


def plot(timelines: dict[str, Timeline], path: Path) -> None:
    """Draw timelines below each other on one scale of time, one row per device, and write a PNG.

    Args:
        timelines: by title, such as "measured" and "simulated".
        path: of the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, no global state of pyplot
    from matplotlib.figure import Figure

    rows = sum(timeline.num_devices for timeline in timelines.values())
    figure = Figure(figsize=(11, 1.1 * len(timelines) + 0.42 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, timeline) in zip(axes, timelines.items(), strict=True):
        _draw(axis, title, timeline)
    axes[-1].set_xlabel("milliseconds since the step began")
    handles = [axes[0].barh(0, 0, color=color, label=str(kind)) for kind, color in _COLORS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=120)


def _draw(axis: Any, title: str, timeline: Timeline) -> None:
    begin = min(event.start for event in timeline.events)
    for task, start, end in timeline.events:
        row, left, width = timeline.row(task), (start - begin) * 1e3, (end - start) * 1e3
        strength = 0.75 ** (task.stage // timeline.num_devices)  # a device's later stages are paler
        style = {"height": 0.82, "color": _COLORS[task.kind], "alpha": strength, "edgecolor": "white", "linewidth": 0.6}
        axis.barh(row, width, left=left, **style)
        if width > 0.018 * timeline.makespan_seconds * 1e3:
            axis.text(left + width / 2, row, str(task.micro_batch), ha="center", va="center", fontsize=7, color="white")
    axis.set_yticks(range(timeline.num_devices), timeline.row_names())
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    milliseconds = timeline.makespan_seconds * 1e3
    axis.set_title(f"{title}: {milliseconds:.1f} ms, bubble {timeline.bubble:.1%}", loc="left", fontsize=10)


class Clock:
    """Times the tasks of one step.

    On the CPU it reads the host's clock; on CUDA it leaves events in the stream, and nothing waits for them before
    `events` is called. Times are seconds since the epoch, so that those of several processes can stand side by side (of
    several hosts, as well as their clocks agree).

    Args:
        cuda: whether to leave events on CUDA devices; without, tasks there are not timed.
    """

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self._offset = time.time() - time.perf_counter()
        self._host: list[tuple[Task, float, float]] = []
        self._device: list[tuple[Task, torch.device, torch.cuda.Event, torch.cuda.Event]] = []
        self._origins: dict[torch.device, tuple[float, torch.cuda.Event]] = {}

    def start(self, device: torch.device) -> float | torch.cuda.Event | None:
        """Return a mark of when a task begins on a device, for `stop`."""
        if device.type != "cuda":
            return time.perf_counter()
        if not self._cuda:
            return None
        if device not in self._origins:
            torch.cuda.synchronize(device)
            self._origins[device] = time.perf_counter(), self._mark(device)
        return self._mark(device)

    def stop(self, task: Task, device: torch.device, mark: float | torch.cuda.Event | None) -> None:
        """Note that a task ends, which began at a mark."""
        if isinstance(mark, float):
            self._host.append((task, mark, time.perf_counter()))
        elif mark is not None:
            self._device.append((task, device, mark, self._mark(device)))

    def events(self) -> list[Event]:
        """Return the tasks with their times; on CUDA, wait for them first."""
        found = [Event(task, start + self._offset, end + self._offset) for task, start, end in self._host]
        for task, device, before, after in self._device:
            after.synchronize()
            origin, mark = self._origins[device]
            origin += self._offset
            found.append(Event(task, origin + mark.elapsed_time(before) / 1e3, origin + mark.elapsed_time(after) / 1e3))
        return found

    @staticmethod
    def _mark(device: torch.device) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event
