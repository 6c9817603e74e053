"""The pictures of the second notebook: memory, speed-ups, and where a step's time goes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
from house_style import Color, draw_legend_above
from matplotlib.ticker import FixedLocator, NullLocator

from gpipe.pipeline.schedule import Kind, Rematerialize
from gpipe.pipeline.schedules.choice import SCHEDULES
from gpipe.pipeline.timeline import Timeline
from gpipe.planning.simulation import simulate
from gpipe.records import Record, read_records
from reproductions import RUNS_FILE
from reproductions.pages import read_paper
from reproductions.speed_ups import (
    Key,
    divide_by_base,
    find_grid,
    grid_speeds,
    key_of,
    median_speed,
)
from reproductions.speed_ups import count_near as count_near_cells
from reproductions.table import newest
from reproductions.table1_model_size.tables import CUTS, name_column
from reproductions.table2_throughput.tables import GRID, name_model
from reproductions.table3_slow_links.tables import GRID as SLOW_GRID

HATCHES = {"planned": "////", "simulated": "----", "measured": ""}
LINES = {"planned": {"ls": "--", "marker": "s", "mfc": "white"}, "simulated": {"ls": "-", "marker": "."}}
PAPER = {"ls": "", "marker": "D", "color": Color.PAPER, "ms": 7, "mfc": "none", "label": "the paper"}
TORCHGPIPE = {"ls": "", "marker": "x", "color": Color.FAINT, "ms": 6, "label": "torchgpipe"}
ROOT, GIB, MIB = Path("../reproductions"), 2**30, 2**20
CAPACITY, SPEED, SLOW, BUBBLE = (
    ROOT / name for name in ("table1_model_size", "table2_throughput", "table3_slow_links", "bubble")
)
records = {folder: read_records(folder / RUNS_FILE) for folder in (CAPACITY, SPEED, SLOW, BUBBLE)}
paper = {folder: read_paper(folder) for folder in (CAPACITY, SPEED, SLOW)}


def draw_bars(axis: plt.Axes, places: Sequence[float], heights: Sequence[float], kind: str, **style: Any) -> None:
    """Draw bars with the pattern of their kind."""
    axis.bar(places, heights, hatch=HATCHES[kind], edgecolor="white", linewidth=0.4, **style)


capacity = newest(record for record in records[CAPACITY] if record.kind == "planned" and "columns" in record.results)
assert capacity is not None
columns = {(column["family"], column["name"]): column for column in capacity.results["columns"]}
PARTS = {
    "weights, gradients, optimiser": Color.PARAMETERS,
    "stash": Color.BOUNDARY_INPUTS,
    "activations at work": Color.ACTIVATIONS,
}


def draw_stages(axis: plt.Axes, column: Mapping[str, Any], cut: str) -> None:
    """Draw what each stage holds at its peak, planned, below the line of its device's memory."""
    bottoms = [0.0] * column["num_stages"]
    devices, places = column["cuts"][cut]["devices"], range(column["num_stages"])
    for part, color in PARTS.items():
        # The rest is what the peak leaves: it may come before all gradients are there.
        sizes = {
            "weights, gradients, optimiser": [device["parameter_bytes"] for device in devices],
            "stash": [device["stash_bytes"] for device in devices],
            "activations at work": [d["peak_bytes"] - d["parameter_bytes"] - d["stash_bytes"] for d in devices],
        }[part]
        heights = [size / GIB for size in sizes]
        assert min(heights) >= 0
        draw_bars(axis, places, heights, "planned", bottom=bottoms, color=color, label=part)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    room = column["memory_bytes"] / GIB
    for place, peak in zip(places, bottoms, strict=True):
        color = Color.LIMIT if peak > room else Color.BELOW_LIMIT
        text = axis.text(place, peak + 0.02 * room, f"{peak:.1f}", ha="center", va="bottom", fontsize=8, color=color)
        text.set_bbox({"color": "white", "pad": 0.4})
    axis.axhline(room, color=Color.LIMIT, linewidth=1.2, zorder=0, label="the device's memory")
    axis.set_ylim(0, room * 1.2)
    axis.set_xticks(places)


def describe_fit(column: Mapping[str, Any]) -> list[str]:
    """Return a row of what the fullest device holds with each cut, and whether it fits."""
    room = column["memory_bytes"]
    peaks = [max(device["peak_bytes"] for device in column["cuts"][cut]["devices"]) for cut in CUTS]
    fits = [f"{peak / GIB:.1f}, {'fits' if peak <= room else 'does not fit'}" for peak in peaks]
    return [name_column(column), f"{column['parameters'] / 1e6:,.0f}M", f"{room / GIB:g}", *fits]


COLUMNS_M = 32  # of experiments/table1_capacity/columns.py, with fused attention
Choice = tuple[int, str | None]
CHOICES: dict[str, dict[Choice, tuple[str, str]]] = {
    "amoebanet": {
        (16, None): (Color.ACTIVATIONS_M16, "M = 16"),
        (COLUMNS_M, None): (Color.ACTIVATIONS, "M = 32"),
        (128, None): (Color.ACTIVATIONS_M128, "M = 128"),
    },
    "transformer": {
        (16, "op by op"): (Color.ACTIVATIONS_M16, "M = 16, op by op"),
        (32, "op by op"): (Color.ACTIVATIONS, "M = 32, op by op"),
        (COLUMNS_M, None): (Color.ACTIVATIONS_FUSED, "M = 32, fused"),
    },
}


def sum_activations(family: str, name: str, choice: Choice) -> float:
    """Return the planned bytes of activations of all devices together, with the paper's cut."""
    for row in capacity.results["variants"]:
        if (row["family"], row["name"], row["num_microbatches"], row["attention"]) == (family, name, *choice):
            return float(row["activation_bytes"]["variance of FLOPs"])
    devices = columns[family, name]["cuts"]["variance of FLOPs"]["devices"]
    return float(sum(device["activation_bytes"] for device in devices))


def draw_activations(axis: plt.Axes, family: str) -> None:
    """Draw the activations of each pipeline per device: planned, the paper's, and torchgpipe's."""
    rows = [row for row in paper[CAPACITY] if row["family"] == family and row["name"] != "Naive-1"]
    shares = [1 / int(row["num_stages"]) for row in rows]
    for index, (choice, (color, label)) in enumerate(CHOICES[family].items()):
        sizes = [sum_activations(family, row["name"], choice) * share for row, share in zip(rows, shares, strict=True)]
        places = [place + 0.26 * (index - 1) for place in range(len(rows))]
        draw_bars(axis, places, [size / GIB for size in sizes], "planned", width=0.25, color=color, label=label)
    for name, offset, style in (("activation_gb", 0.0, PAPER), ("torchgpipe_activation_gib", 0.26, TORCHGPIPE)):
        known = [(place + offset, float(row[name]) * shares[place]) for place, row in enumerate(rows) if row[name]]
        axis.plot(*zip(*known, strict=True), **style) if known else None
    axis.set_xticks(range(len(rows)), [f"{row['name']}" for row in rows])
    axis.set_ylim(0, None)


def compute_law(key: Key) -> float:
    """Return the examples per unit of time, with equal stages and early recomputation."""
    _, k, m = key
    return k * m / (4 * m + 3 * (k - 1))


def compute_bubble_law(key: Key) -> float:
    """Return the same by only the bubble formula."""
    _, k, m = key
    return k * m / (4 * (m + k - 1))


def draw_speed_ups(axis: plt.Axes, folder: Path, experiment: str, title: str, count: int) -> None:
    """Draw speed-ups over K of one model with one M: the paper's, planned, simulated, and the laws."""
    rows = [row for row in paper[folder] if row["title"] == title and int(row["num_microbatches"]) == count]
    stages = [int(row["num_stages"]) for row in rows]
    keys = {key_of(row) for row in paper[folder]}
    for found, style, label in (
        (compute_bubble_law, Color.BUBBLE_LAW, "bubble law"),
        (compute_law, Color.EARLY_LAW, "with early recomputation"),
    ):
        speeds = divide_by_base({key: found(key) for key in keys}, paper[folder])
        axis.plot(stages, [speeds[title, k, count] for k in stages], ls=":", lw=2, color=style, label=label)
    for cut, color, of in (
        ("flops", Color.CUT_BY_FLOPS, ", cut by FLOPs"),
        ("seconds", Color.CUT_BY_SECONDS, ""),
    ):
        for kind in ("planned", "simulated"):
            speeds = divide_by_base(
                grid_speeds(find_grid(records[folder], experiment, kind), "fits", cut), paper[folder]
            )
            known = [(k, speeds[title, k, count]) for k in stages if (title, k, count) in speeds]
            if known:
                axis.plot(*zip(*known, strict=True), **LINES[kind], color=color, ms=5, label=f"{kind}{of}")
    axis.plot(stages, [float(row["speed_up"]) for row in rows], **PAPER)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(stages))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xticklabels([str(k) for k in stages])
    axis.set_title(f"{title}, M = {count}")


def count_near(speed_ups: Mapping[Key, float], title: str) -> str:
    """Say how many of a model's speed-ups beside the base are within 20 % of the paper's."""
    known = {key: value for key, value in speed_ups.items() if key[0] == title and value > 0}
    return count_near_cells(known, [row for row in paper[SPEED] if row["title"] == title])


SHARES = {
    "bubble": ("bubble", Color.BUBBLE),
    "imbalance": ("imbalance", Color.IMBALANCE),
    "transfer": ("transfer", Color.TRANSFER),
    "update": ("optimiser", Color.UPDATE),
    "recomputation": ("recomputation", Color.RECOMPUTATION),
    "computing": ("computing", Color.COMPUTING),
}


def draw_shares(axis: plt.Axes, model: Mapping[str, Any]) -> None:
    """Draw where the simulated time of each cell goes; draw below 0 what shortens a step."""
    cells = [cell for cell in model["cells"] if (cell["batch"], cell["cut_by"]) == ("fits", "seconds")]
    places = [index + index // 3 * 0.6 for index in range(len(cells))]
    tops = [0.0] * len(cells)
    for name, (label, color) in SHARES.items():
        heights = [100 * cell["shares"][name] for cell in cells]
        bottoms = [top if height > 0 else 0.0 for top, height in zip(tops, heights, strict=True)]
        draw_bars(axis, places, heights, "simulated", bottom=bottoms, color=color, label=label)
        tops = [top + max(height, 0.0) for top, height in zip(tops, heights, strict=True)]
    for place, cell in zip(places, cells, strict=True):
        k, m = cell["num_stages"], cell["num_microbatches"]
        axis.plot(
            [place - 0.4, place + 0.4], [100 * (k - 1) / (m + k - 1)] * 2, color="black", lw=1.3, label="(K-1)/(M+K-1)"
        )
    axis.set_xticks(places, [str(cell["num_microbatches"]) for cell in cells])
    for group, k in enumerate(dict.fromkeys(cell["num_stages"] for cell in cells)):
        axis.text(fmean(places[3 * group : 3 * group + 3]), 104, f"K = {k}", ha="center")
    axis.set_ylim(-3, 112)
    axis.set_title(model["model"])
    axis.set_xlabel("M, micro-batches")


simulated = find_grid(records[SPEED], GRID, "simulated")
BATCHES = {
    "fits": ("largest that fits", Color.BATCH_FITS),
    "fixed": ("growing mini-batch", Color.BATCH_GROWS),
    "equal": ("equal mini-batch", Color.BATCH_EQUAL),
}


def draw_batches(axis: plt.Axes, title: str) -> None:
    """Draw simulated speed-ups for M = 32 with each way to choose the batch, beside the paper's."""
    rows = [row for row in paper[SPEED] if row["title"] == title and row["num_microbatches"] == "32"]
    for index, (batch, (label, color)) in enumerate(BATCHES.items()):
        speeds = divide_by_base(grid_speeds(simulated, batch), paper[SPEED])
        heights = [speeds[key_of(row)] for row in rows]
        places = [place + 0.26 * (index - 1) for place in range(len(rows))]
        draw_bars(axis, places, heights, "simulated", width=0.25, color=color, label=label)
    axis.plot(range(len(rows)), [float(row["speed_up"]) for row in rows], **PAPER)
    axis.set_xticks(range(len(rows)), [f"K = {row['num_stages']}" for row in rows])
    axis.set_title(title)


def draw_measured(axis: plt.Axes, speeds: Mapping[tuple[int, int], float]) -> None:
    """Draw measured examples per second by (K, M), and what the law makes of those of one stage."""
    stages, counts = (sorted({key[index] for key in speeds}) for index in (0, 1))
    for index, (k, color) in enumerate(zip(stages, (Color.K1, Color.K2, Color.K4, Color.K8), strict=False)):
        for place, m in enumerate(counts):
            left, speed, alone = place + 0.8 / len(stages) * (index + 0.5) - 0.4, speeds.get((k, m)), speeds.get((1, m))
            if speed:
                draw_bars(axis, [left], [speed], "measured", width=0.76 / len(stages), color=color, label=f"K = {k}")
            if speed and alone and k > 1:
                expected = alone * compute_law(("", k, m)) / compute_law(("", 1, m))
                text = f"x {speed / alone:.2f}"
                axis.text(left, 0.5 * speed, text, ha="center", va="center", color="white", fontsize=9)
                axis.plot([left - 0.2, left + 0.2], [expected] * 2, color="black", lw=1.5, label="the law")
    axis.set_xticks(range(len(counts)), [f"M = {m}" for m in counts])


def read_step(record: Record) -> dict[str, Timeline]:
    """Return the timeline of a recorded step, and its simulation."""
    step = Timeline.from_json(record.results["events"], record.results["num_devices"])
    pipeline = record.config["pipeline"]
    shape = pipeline["num_stages"], pipeline["num_microbatches"], Rematerialize(pipeline["rematerialize"])
    schedule = SCHEDULES[pipeline["schedule"]](*shape, pipeline["stages_per_device"])
    return {"measured": step, "simulated": simulate(schedule, step.mean_seconds())}


def describe_step(record: Record, timelines: Mapping[str, Timeline]) -> str:
    """Say how the step compares with its simulation, and how equal the stages are."""
    step, again = timelines["measured"], timelines["simulated"]
    busy = [f"{seconds * 1e3:.0f}" for seconds in step.busy_seconds()]
    recomputed = sum(step.busy_seconds(Kind.RECOMPUTE)) / sum(step.busy_seconds())
    off = step.makespan_seconds / again.makespan_seconds - 1
    k, m = (record.config["pipeline"][name] for name in ("num_stages", "num_microbatches"))
    equal = 1 - 4 * compute_law(("", k, m)) / k
    return (
        f"Layers per stage: {', '.join(map(str, record.results['partitions']))}. The stages worked "
        f"{' and '.join(busy)} ms, {recomputed:.0%} of it recomputing. The measured step is {off:+.1%} off "
        f"the simulated one. Bubble: {equal:.1%} if the stages were equal, {again.bubble:.1%} simulated, "
        f"{step.bubble:.1%} measured. The fastest of {record.results['num_runs']} runs."
    )


SHOWN = [("amoebanet", "Pipeline-4"), ("amoebanet", "Pipeline-8"), ("transformer", "Pipeline-8")]


def draw_capacity() -> None:
    """Draw what the stages of three models hold, with each of the two cuts."""
    figure, axes = plt.subplots(2, 3, figsize=(10, 5.2), layout="constrained", width_ratios=(1, 1.6, 1.6))
    for row, cut in zip(axes, CUTS, strict=True):
        for axis, key in zip(row, SHOWN, strict=True):
            draw_stages(axis, columns[key], cut)
        row[0].set_ylabel(f"{CUTS[cut]}\nplanned peak, GiB")
    for (top, bottom), key in zip(axes.T, SHOWN, strict=True):
        top.set_title(name_column(columns[key]).replace(": ", ":\n"))
        bottom.set_xlabel("stage")
    draw_legend_above(figure, axes[0, 0])
    plt.show()


def draw_all_activations() -> None:
    """Draw the activations of both families of models, by the number of micro-batches."""
    _, axes = plt.subplots(1, 2, figsize=(10, 3.9), layout="constrained")
    for axis, family, title in zip(axes, CHOICES, ("AmoebaNet-D", "Transformer"), strict=True):
        draw_activations(axis, family)
        axis.set_title(title)
        axis.margins(y=0.15)
        axis.legend(fontsize=8, loc="upper center", ncols=2)
        axis.set_ylim(0, 1.45 * axis.get_ylim()[1])
    axes[0].set_ylabel("activations per device, GiB\nbars planned, the paper's cut")
    plt.show()


SCHEDULE_COLORS = {
    "gpipe": Color.GPIPE,
    "1f1b": Color.ONE_F_ONE_B,
    "interleaved_1f1b": Color.INTERLEAVED,
    "split_gpipe": Color.SPLIT_GPIPE,
    "zb_h1": Color.ZB_H1,
    "zb_v": Color.ZB_V,
}
MODES = {"always": "re-materialised", "never": "all activations kept"}


def draw_schedules() -> None:
    """Draw what each device holds with each schedule, with and without re-materialisation."""
    schedules = newest(records[BUBBLE], "schedule_memory")
    assert schedules is not None
    _, axes = plt.subplots(1, 2, figsize=(10, 3.7), layout="constrained", sharey=True)
    for axis, (mode, title) in zip(axes, MODES.items(), strict=True):
        for row in (row for row in schedules.results["rows"] if row["rematerialize"] == mode):
            label = f"{row['schedule']}: {row['step_seconds']:.2f} s per step, bubble {row['bubble']:.1%}"
            peaks = [peak / GIB for peak in row["peak_bytes"]]
            axis.plot(peaks, **LINES["planned"], color=SCHEDULE_COLORS[row["schedule"]], label=label)
        axis.axhline(16, color=Color.LIMIT, linewidth=1.2)
        axis.text(7.3, 16.2, "the device's memory", color=Color.LIMIT, ha="right", va="bottom", fontsize=9)
        axis.set_title(title)
        axis.set_xlabel("device")
        axis.set_ylim(0, 48)
        axis.legend(loc="upper left", fontsize=9)
    axes[0].set_ylabel("planned peak, GiB")
    plt.show()


def draw_deviations_of_plans() -> list[float]:
    """Draw how far planned peaks are from the allocator's; return all deviations in percent."""
    held = newest(records[CAPACITY], "planned_memory")
    assert held is not None
    groups: dict[str, list[tuple[float, float]]] = {}
    for row in held.results["rows"]:
        pairs = zip(row["measured_bytes"], row["planned_bytes"], strict=True)
        points = [(measured / MIB, 100 * (planned / measured - 1)) for measured, planned in pairs]
        groups.setdefault(row["model"], []).extend(points)
    _, axis = plt.subplots(figsize=(10, 3.1), layout="constrained")
    for (model, points), color, marker in zip(
        groups.items(), (Color.AMOEBANET, Color.TRANSFORMER), ("o", "^"), strict=True
    ):
        axis.plot(*zip(*points, strict=True), marker, color=color, alpha=0.65, markeredgewidth=0, label=model)
    axis.axhline(0, color="gray", linewidth=1)
    axis.set_ylim(-10, 10)
    axis.set_xlabel("measured peak of a stage, MiB")
    axis.set_ylabel("planned above measured, %")
    axis.legend(ncols=2, loc="upper right")
    plt.show()
    return [abs(deviation) for points in groups.values() for _, deviation in points]


theirs = {key_of(row): float(row["torchgpipe_samples_per_second"] or "nan") for row in paper[SPEED]}
their_speed_ups = divide_by_base(theirs, paper[SPEED])
titles = list(dict.fromkeys(row["title"] for row in paper[SPEED]))


def draw_table2() -> None:
    """Draw the speed-ups of Table 2: the paper's, torchgpipe's, planned, simulated, and the laws."""
    figure, axes = plt.subplots(2, 3, figsize=(10, 6.4), layout="constrained", sharey=True)
    for row, title in zip(axes, titles, strict=True):
        for axis, count in zip(row, (1, 4, 32), strict=True):
            draw_speed_ups(axis, SPEED, GRID, title, count)
            axis.plot((2, 4, 8), [their_speed_ups[title, k, count] for k in (2, 4, 8)], **TORCHGPIPE)
            axis.set_ylim(0, 7)
        row[0].set_ylabel("throughput over K = 2, M = 1")
    for axis in axes[1]:
        axis.set_xlabel("K, stages")
    draw_legend_above(figure, axes[0, 0], ncols=4)
    plt.show()


def draw_all_shares() -> None:
    """Draw where the simulated time of all cells goes."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained", sharey=True)
    for axis, model in zip(axes, simulated, strict=True):
        draw_shares(axis, model)
    axes[0].set_ylabel("simulated, % of a step")
    draw_legend_above(figure, axes[0], ncols=7)
    plt.show()


def draw_slow_links() -> None:
    """Draw the speed-ups of Table 3."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.9), layout="constrained", sharey=True)
    for axis, title in zip(axes, dict.fromkeys(row["title"] for row in paper[SLOW]), strict=True):
        draw_speed_ups(axis, SLOW, SLOW_GRID, title, 32)
        axis.set_ylim(0, 4)
        axis.set_xlabel("K, stages")
    axes[0].set_ylabel("throughput over K = 2")
    draw_legend_above(figure, axes[0], ncols=4)
    plt.show()


def draw_all_batches() -> None:
    """Draw simulated speed-ups of both models with each way to choose the batch."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.3), layout="constrained", sharey=True)
    for axis, title in zip(axes, titles, strict=True):
        draw_batches(axis, title)
    axes[0].set_ylabel("simulated throughput\nover K = 2, M = 1")
    draw_legend_above(figure, axes[0])
    plt.show()


def draw_all_measured(measured: Mapping[str, Mapping[Key, Sequence[Record]]]) -> None:
    """Draw measured speeds, one row per model, one column per way to choose the mini-batch."""
    names = list(dict.fromkeys(name_model(runs[0]) for cells in measured.values() for runs in cells.values()))
    size = (10, 2.9 * len(names) + 0.4)
    figure, axes = plt.subplots(len(names), len(measured), figsize=size, layout="constrained", squeeze=False)
    for column_axes, (label, cells) in zip(axes.T, measured.items(), strict=True):
        for axis, name in zip(column_axes, names, strict=True):
            speeds = {
                (k, m): speed
                for (_, k, m), runs in cells.items()
                if name_model(runs[0]) == name and (speed := median_speed(runs))
            }
            if speeds:
                draw_measured(axis, speeds)
            axis.set_title(f"{name}, {label}")
    for axis in axes[:, 0]:
        axis.set_ylabel("measured, examples/s")
    draw_legend_above(figure, axes[0, 0])
    plt.show()
