"""The tasks of a step in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpipe.pipeline.schedule import Task


def make_trace(
    events: Iterable[tuple[Task, float, float]], row: Callable[[Task], int], names: Sequence[str]
) -> dict[str, Any]:
    """Return a trace, of JSON's types.

    Args:
        events: tasks, each with its start and end, in seconds.
        row: task -> the number of the row that shows it.
        names: of the rows.
    """
    rows: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": name}}
        for number, name in enumerate(names)
    ]
    rows += [
        {
            "name": f"{task.kind.words} {task.micro_batch}",
            "cat": str(task.kind),
            "ph": "X",
            "pid": 0,
            "tid": row(task),
            "ts": start * 1e6,
            "dur": (end - start) * 1e6,
            "args": {"stage": task.stage, "micro_batch": task.micro_batch},
        }
        for task, start, end in events
    ]
    return {"traceEvents": rows, "displayTimeUnit": "ms"}
