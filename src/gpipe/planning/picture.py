"""Draw timelines, measured or simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpipe.pipeline.schedule import Kind
from gpipe.pipeline.timeline import Timeline

COLORS = {
    Kind.FORWARD: "#4878a8",
    Kind.RECOMPUTE: "#c9a227",
    Kind.BACKWARD: "#7d9d5b",
    Kind.INPUT_GRADIENTS: "#7d9d5b",
    Kind.WEIGHT_GRADIENTS: "#bcd0a4",
}
_DIGIT_WIDTH = 0.0085  # as a fraction of the picture's width, with some margin


def plot(timelines: dict[str, Timeline], path: str | Path) -> None:
    """Draw timelines below each other on the same time scale, one row per device.

    Args:
        timelines: by title, such as "measured" and "simulated".
        path: of the picture; its suffix, such as .png or .svg, chooses the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, no global state of pyplot
    from matplotlib.figure import Figure

    rows = sum(timeline.num_devices for timeline in timelines.values())
    figure = Figure(figsize=(11, 1.1 * len(timelines) + 0.42 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(timeline.makespan_seconds for timeline in timelines.values())
    for axis, (title, timeline) in zip(axes, timelines.items(), strict=True):
        _draw(axis, title, timeline, 1e3 * longest)
    axes[-1].set_xlabel("milliseconds since the step began")
    found = {event.task.kind for timeline in timelines.values() for event in timeline.events}
    handles = [axes[0].barh(0, 0, color=COLORS[kind], label=kind.words) for kind in Kind if kind in found]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)
    undated: dict[str, Any] | None = {"Date": None} if Path(path).suffix == ".svg" else None
    figure.savefig(path, dpi=144, metadata=undated)


def _draw(axis: Any, title: str, timeline: Timeline, longest_milliseconds: float) -> None:
    """Draw one timeline, with the micro-batch's number in each box that is wide enough."""
    begin = min(event.start for event in timeline.events)
    for task, start, end in timeline.events:
        row, left, width = timeline.row(task), (start - begin) * 1e3, (end - start) * 1e3
        strength = 0.75 ** (task.stage // timeline.num_devices)  # a device's later stages are paler
        style = {"height": 0.82, "color": COLORS[task.kind], "alpha": strength, "edgecolor": "white", "linewidth": 0.6}
        axis.barh(row, width, left=left, **style)
        number = str(task.micro_batch)
        if width > _DIGIT_WIDTH * (len(number) + 0.5) * longest_milliseconds:
            color = "white" if task.kind is Kind.FORWARD and strength == 1 else "black"
            axis.text(left + width / 2, row, number, ha="center", va="center", fontsize=9, color=color)
    axis.set_yticks(range(timeline.num_devices), timeline.row_names())
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    milliseconds = timeline.makespan_seconds * 1e3
    axis.set_title(f"{title}: {milliseconds:.1f} ms, bubble {timeline.bubble:.1%}", loc="left", fontsize=10)
