"""The picture of timelines, measured or simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpipe.pipeline.schedule import Kind
from gpipe.pipeline.timeline import Timeline

_COLORS = {Kind.FORWARD: "#4878a8", Kind.RECOMPUTE: "#c9a227", Kind.BACKWARD: "#7d9d5b"}


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
