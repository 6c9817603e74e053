"""Draw the README's picture from the schedule and from a recorded step, and its badges from pyproject.toml.

    python docs/pictures.py

writes docs/pictures/step.svg: GPipe's schedule as `gpipe.pipeline.schedule` lists it, and below it the newest recorded
step of the small Transformer (reproductions/table2_throughput/runs.jsonl), simulated and measured. The simulation gives
each task the mean of its measured seconds. Beside it are the badges. Nothing in the
files depends on fonts or on a plotting library's version.
"""

import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path

from gpipe.pipeline.schedule import Kind, Rematerialize, gpipe
from gpipe.pipeline.timeline import Timeline
from gpipe.planning.simulation import simulate
from gpipe.records import Record, read_records

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "step.svg"
BADGE_COLORS = "#444", "#4878a8"  # of the name, and of the value
BADGE_HEIGHT, CHARACTER_WIDTH, PADDING = 20, 7, 8  # pixels
RECORDS = ROOT / "reproductions" / "table2_throughput" / "runs.jsonl"

COLORS = {Kind.FORWARD: "#4878a8", Kind.RECOMPUTE: "#c9a227", Kind.BACKWARD: "#7d9d5b"}
UNITS = {Kind.FORWARD: 1.0, Kind.RECOMPUTE: 1.0, Kind.BACKWARD: 2.0}
NUM_STAGES, NUM_MICROBATCHES = 4, 8
WIDTH, LEFT, RIGHT = 960, 70, 10  # pixels
ROW_HEIGHT, TITLE_HEIGHT, GAP = 24, 26, 16


def draw_picture() -> str:
    """Return the picture as SVG."""
    body: list[str] = []
    top = GAP
    for group in (_simulate_schedule(), _read_recorded_step()):
        longest = max(timeline.makespan_seconds for timeline in group.values())
        for title, timeline in group.items():
            body += _draw_timeline(timeline, title, top, (WIDTH - LEFT - RIGHT) / longest)
            top += TITLE_HEIGHT + ROW_HEIGHT * timeline.num_devices + GAP
    body += _draw_legend(top)
    height = top + ROW_HEIGHT
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *body, "</svg>", ""])


def draw_badges() -> dict[Path, str]:
    """Return the badges as SVG, by their files: what the code needs, its version and its licence."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (torch,) = project["dependencies"]
    values = {
        "version": project["version"],
        "python": project["requires-python"],
        "torch": torch.removeprefix("torch").replace(",", ", "),
        "license": project["license"],
    }
    return {PICTURE.with_name(f"badge_{name}.svg"): _draw_badge(name, value) for name, value in values.items()}


def _draw_badge(name: str, value: str) -> str:
    widths = [len(text) * CHARACTER_WIDTH + 2 * PADDING for text in (name, value)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{sum(widths)}" height="{BADGE_HEIGHT}" role="img"'
    body = [f'{head} aria-label="{name}: {escape(value)}" font-family="sans-serif">']
    left = 0
    for text, width, color in zip((name, value), widths, BADGE_COLORS, strict=True):
        body.append(f'<rect x="{left}" width="{width}" height="{BADGE_HEIGHT}" fill="{color}"/>')
        body.append(_text(left + width / 2, 14, escape(text), 11, 'fill="white" text-anchor="middle"'))
        left += width
    return "\n".join([*body, "</svg>", ""])


def _simulate_schedule() -> dict[str, Timeline]:
    """Return the schedule as a step whose forwards take one unit of time and whose backwards take two."""
    tasks = gpipe(NUM_STAGES, NUM_MICROBATCHES, Rematerialize.ALWAYS)
    step = simulate(tasks, lambda task: UNITS[task.kind])
    return {f"The schedule of {NUM_STAGES} stages and {NUM_MICROBATCHES} micro-batches: bubble {step.bubble:.1%}": step}


def _read_recorded_step() -> dict[str, Timeline]:
    """Return the newest recorded step of the Transformer, simulated and measured."""
    record = max(filter(_is_step, read_records(RECORDS)), key=lambda record: record.date)
    settings = record.config["pipeline"]
    num_stages, num_microbatches = settings["num_stages"], settings["num_microbatches"]
    measured = Timeline.from_json(record.results["events"], record.results["num_devices"])
    tasks = gpipe(num_stages, num_microbatches, Rematerialize(settings["rematerialize"]))
    steps = {"Simulated": simulate(tasks, measured.mean_seconds()), "Measured": measured}
    of = f"a step of a Transformer with {record.config['model']['num_layers']} layers, in {num_stages} processes"
    return {
        f"{kind}, {of}: {step.makespan_seconds * 1e3:,.0f} ms, bubble {step.bubble:.1%}": step
        for kind, step in steps.items()
    }


def _is_step(record: Record) -> bool:
    return record.experiment == "step_timeline" and record.config["model"]["family"] == "transformer_lm"


def _draw_timeline(timeline: Timeline, title: str, top: float, scale: float) -> Iterator[str]:
    """Yield the title, and per device a row of its tasks with the numbers of their micro-batches."""
    begin = min(event.start for event in timeline.events)
    yield _text(LEFT, top + 16, title, 14)
    top += TITLE_HEIGHT
    for row, name in enumerate(timeline.row_names()):
        yield _text(0, top + row * ROW_HEIGHT + 16, name, 12)
    for task, start, end in timeline.events:
        left, width, row_top = (
            LEFT + (start - begin) * scale,
            (end - start) * scale,
            top + timeline.row(task) * ROW_HEIGHT,
        )
        yield (
            f'<rect x="{left:.1f}" y="{row_top}" width="{width:.1f}" height="{ROW_HEIGHT - 3}" '
            f'fill="{COLORS[task.kind]}" stroke="white"/>'
        )
        if width > 12:
            yield _text(left + width / 2, row_top + 15, str(task.micro_batch), 11, 'fill="white" text-anchor="middle"')


def _draw_legend(top: float) -> Iterator[str]:
    for number, (kind, color) in enumerate(COLORS.items()):
        left = LEFT + 110 * number
        yield f'<rect x="{left}" y="{top}" width="14" height="14" fill="{color}"/>'
        yield _text(left + 20, top + 12, str(kind), 12)


def _text(left: float, baseline: float, text: str, size: int, more: str = 'fill="#222"') -> str:
    return f'<text x="{left:.1f}" y="{baseline:.1f}" font-size="{size}" {more}>{text}</text>'


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    for file, picture in {PICTURE: draw_picture(), **draw_badges()}.items():
        file.write_text(picture, encoding="utf-8")
