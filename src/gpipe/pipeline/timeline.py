"""When each task of a step ran, and when a simulation says that it should: bubble, picture, Perfetto trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpipe.pipeline.schedule import Kind, Schedule, Task, dependencies

_COLORS = {Kind.FORWARD: "#4878a8", Kind.RECOMPUTE: "#c9a227", Kind.BACKWARD: "#7d9d5b"}


class Event(NamedTuple):
    """A task and when it ran, in seconds since the step began."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The events of one step, of all stages.

    Attributes:
        events: in any order.
        num_stages: K, also where a stage has no event.
    """

    events: tuple[Event, ...]
    num_stages: int

    @property
    def makespan_seconds(self) -> float:
        """Seconds from the first task's start to the last one's end."""
        return max(event.end for event in self.events) - min(event.start for event in self.events)

    def busy_seconds(self, kind: Kind | None = None) -> list[float]:
        """Return the seconds that each stage spent in tasks (of one kind)."""
        busy = [0.0] * self.num_stages
        for task, start, end in self.events:
            if kind is None or task.kind is kind:
                busy[task.stage] += end - start
        return busy

    @property
    def bubble(self) -> float:
        """The share of the stages' time in which they had no task: 1 - busy / (K x makespan)."""
        return 1 - sum(self.busy_seconds()) / (self.num_stages * self.makespan_seconds)

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
    def from_json(cls, rows: Iterable[Sequence[Any]], num_stages: int) -> Timeline:
        """Read what `to_json` wrote."""
        events = (Event(Task(Kind(kind), stage, m), start, end) for kind, stage, m, start, end in rows)
        return cls(tuple(events), num_stages)

    def write_trace(self, path: Path) -> None:
        """Write a trace in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open."""
        stages = range(self.num_stages)
        rows: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}}
            for stage in stages
        ]
        rows += [
            {
                "name": f"{task.kind} {task.micro_batch}",
                "cat": str(task.kind),
                "ph": "X",
                "pid": 0,
                "tid": task.stage,
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
                "args": {"micro_batch": task.micro_batch},
            }
            for task, start, end in self.events
        ]
        path.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))


def simulate(
    schedule: Schedule, seconds: Callable[[Task], float], transfer_seconds: Callable[[Task], float] = lambda _: 0.0
) -> Timeline:
    """Return when each task of a schedule runs if every task takes its time and nothing else does.

    Args:
        schedule: the tasks of each stage, in order.
        seconds: how long a task takes.
        transfer_seconds: how long its result travels to the stage that waits for it; links are never congested.

    Raises:
        ValueError: a task waits for one that never runs.
    """
    num_stages = len(schedule)
    finished: dict[Task, float] = {}
    free = [0.0] * num_stages
    positions = [0] * num_stages
    events: list[Event] = []
    progress = True
    while progress:
        progress = False
        for stage, tasks in enumerate(schedule):
            while positions[stage] < len(tasks):
                task = tasks[positions[stage]]
                needed = dependencies(task, num_stages)
                if not all(other in finished for other in needed):
                    break
                start = max([free[stage], *(finished[other] + transfer_seconds(other) for other in needed)])
                free[stage] = finished[task] = start + seconds(task)
                events.append(Event(task, start, finished[task]))
                positions[stage] += 1
                progress = True
    if len(events) < sum(len(tasks) for tasks in schedule):
        raise ValueError("the schedule cannot proceed: every stage waits for a task that no stage will run")
    return Timeline(tuple(events), num_stages)


def plot(timelines: dict[str, Timeline], path: Path) -> None:
    """Draw timelines below each other on one scale of time, a row a stage, and write a PNG.

    Args:
        timelines: by title, such as "measured" and "simulated".
        path: of the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, no global state of pyplot
    from matplotlib.figure import Figure

    rows = sum(timeline.num_stages for timeline in timelines.values())
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
        left, width = (start - begin) * 1e3, (end - start) * 1e3
        axis.barh(task.stage, width, left=left, height=0.82, color=_COLORS[task.kind], edgecolor="white", linewidth=0.6)
        if width > 0.018 * timeline.makespan_seconds * 1e3:
            axis.text(
                left + width / 2, task.stage, str(task.micro_batch), ha="center", va="center", fontsize=7, color="white"
            )
    axis.set_yticks(range(timeline.num_stages), [f"stage {stage}" for stage in range(timeline.num_stages)])
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    milliseconds = timeline.makespan_seconds * 1e3
    axis.set_title(f"{title}: {milliseconds:.1f} ms, bubble {timeline.bubble:.1%}", loc="left", fontsize=10)
