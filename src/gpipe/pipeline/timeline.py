"""When each task of a step ran, or would run in a simulation: its bubble, and a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gpipe.pipeline.measurement.trace import make_trace
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

    events: tuple[Event, ...] = field(repr=False)
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
        stages = range(1 + max(event.task.stage for event in self.events))
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

    def write_trace(self, path: str | Path) -> None:
        """Write a trace in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open."""
        Path(path).write_text(json.dumps(make_trace(self.events, self.row, self.row_names())))
