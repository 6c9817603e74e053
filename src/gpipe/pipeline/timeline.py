"""When each task of a step ran, or would run in a simulation: bubble, Perfetto trace, clock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpipe.pipeline.schedule import Kind, Task, name_stages


class Event(NamedTuple):
    """A task and when it ran, in seconds since the step began."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The events of one step, of all stages, one row per device.

    Attributes:
        events: in any order.
        num_devices: P.
        placement: the device of each stage; None: stage s is on device s % P.
    """

    events: tuple[Event, ...]
    num_devices: int
    placement: tuple[int, ...] | None = None

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
        return self._row(task.stage)

    def _row(self, stage: int) -> int:
        return stage % self.num_devices if self.placement is None else self.placement[stage]

    def row_names(self) -> list[str]:
        """Return which stages each device has: "stage 1", or "stages 1, 3"."""
        num_stages = 1 + max(event.task.stage for event in self.events)
        stages = range(max(num_stages, self.num_devices))
        return [name_stages(k for k in stages if self._row(k) == row) for row in range(self.num_devices)]

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
    def from_json(
        cls, rows: Iterable[Sequence[Any]], num_devices: int, placement: tuple[int, ...] | None = None
    ) -> Timeline:
        """Read what `to_json` wrote."""
        events = (Event(Task(Kind(kind), stage, m), start, end) for kind, stage, m, start, end in rows)
        return cls(tuple(events), num_devices, placement)

    def write_trace(self, path: Path) -> None:
        """Write a trace in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open."""
        rows: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": name}}
            for row, name in enumerate(self.row_names())
        ]
        rows += [
            {
                "name": f"{task.kind.words} {task.micro_batch}",
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


class Clock:
    """Times the tasks of one step.

    On the CPU it reads the host's clock; on CUDA it leaves events in the stream, and nothing waits for them before
    `events` is called. Times are seconds since the epoch, so that those of several processes can stand side by side (of
    several hosts, as well as their clocks agree).

    Args:
        devices: on which tasks will run, and which have nothing to do.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._offset = _seconds_to_epoch()
        self._host: list[tuple[Task, float, float]] = []
        self._device: list[tuple[Task, torch.device, torch.cuda.Event, torch.cuda.Event]] = []
        self._origins = {
            device: (time.perf_counter(), self._mark(device)) for device in set(devices) if device.type == "cuda"
        }

    def start(self, device: torch.device) -> float | torch.cuda.Event:
        """Return a mark of when a task begins on a device, for `stop`."""
        if device.type != "cuda":
            return time.perf_counter()
        return self._mark(device)

    def stop(self, task: Task, device: torch.device, mark: float | torch.cuda.Event | None) -> None:
        """Note that a task ends, which began at a mark."""
        if isinstance(mark, float):
            self._host.append((task, mark, time.perf_counter()))
        else:
            assert mark is not None
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


def _seconds_to_epoch() -> float:
    """Return what turns a reading of the performance counter into seconds since the epoch.

    A process that is interrupted between the two readings finds too little, and its tasks would seem to run before
    those that they waited for; so the largest of several is the right one.
    """
    return max(time.time() - time.perf_counter() for _ in range(16))
