"""The pictures of the third notebook: accuracies, curves, transfers, sizes and cost."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from math import log
from pathlib import Path
from statistics import fmean, stdev

import matplotlib.pyplot as plt
from house_style import PAPER_ALONE, Color
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from gpipe.records import Record, read_records, same_settings
from reproductions import RUNS_FILE
from reproductions.pages import read_paper
from reproductions.table4_imagenet_and_transfer.model_size import Tuned
from reproductions.table4_imagenet_and_transfer.tables import (
    is_tuned,
    paper_scale_runs,
    reason_not_run,
)
from reproductions.table4_imagenet_and_transfer.transfers import STARTS, Images, Start

FOLDER = Path("../reproductions/table4_imagenet_and_transfer")
records, paper = read_records(FOLDER / RUNS_FILE), read_paper(FOLDER)
titles = {row["data"]: row["title"] for row in paper}


def format_spread(values: Sequence[float]) -> str:
    """Write shares as mean and sample deviation."""
    return f"{fmean(values):.2%}" + (f" ± {100 * stdev(values):.2f}" if len(values) > 1 else "")


def format_count(runs: Sequence[object]) -> str:
    """Write how many runs there are."""
    return f"{len(runs)} run{'s' * (len(runs) != 1)}"


def paper_scale_top1(data: str) -> list[float]:
    """Return top-1 of each run that counts beside the paper's."""
    return [run.results["top1"] for run in paper_scale_runs(records, data)]


def explain_not_run(data: str) -> str:
    """Return the reason on record why a data set was not run."""
    return reason_not_run(records, data) or "no attempt on record"


def draw_table4() -> None:
    """Draw one row per data set: the paper's accuracy, and ours or why there is none."""
    _, axis = plt.subplots(figsize=(9, 4.2), layout="constrained")
    beyond = axis.get_yaxis_transform()  # x in widths of the axis
    for place, row in enumerate(paper):
        expected, ours = float(row["top1"]), paper_scale_top1(row["data"])
        axis.plot(expected, place, "D", color="dimgray", markersize=8, fillstyle="none")
        label = f"{'' if place else 'paper: '}{expected:.1f}"
        axis.text(expected, place - 0.28, label, color="dimgray", ha="center", va="bottom")
        if ours:
            deviation = 100 * stdev(ours) if len(ours) > 1 else None
            axis.errorbar(
                100 * fmean(ours), place, xerr=deviation, fmt="o", color=Color.TRAINING, markersize=6, capsize=3
            )
            text, style = f"{format_spread(ours)}, {format_count(ours)}", {"color": Color.TRAINING}
        else:
            text, style = f"not run: {explain_not_run(row['data'])}", {"color": "dimgray", "style": "italic"}
        axis.text(1.03, place, text, transform=beyond, va="center", **style)
    axis.text(1.03, -0.9, "ours, measured (filled)", transform=beyond, va="center")
    axis.set_yticks(range(len(paper)), [row["title"] for row in paper])
    axis.set_ylim(len(paper) - 0.5, -1.2)
    axis.margins(x=0.1)
    axis.grid(axis="y", color="whitesmoke")
    axis.set_axisbelow(True)
    axis.set_xlabel("test top-1, %")
    if not any(paper_scale_top1(row["data"]) for row in paper):
        axis.set_title(PAPER_ALONE)
    plt.show()


def describe_missing(reasons: Mapping[str, str]) -> list[str]:
    """Say what was not run, in one sentence per reason."""
    return [
        f"Not run, {reason}: {', '.join(titles.get(data, data) for data in reasons if reasons[data] == reason)}."
        for reason in dict.fromkeys(reasons.values())
    ]


def read_curve(runs: Iterable[Record], key: str, by: str = "epoch") -> tuple[list[int], list[list[float]]]:
    """Return the epochs (or the steps) at which all runs have a figure, and the runs' figures at each."""
    values: dict[tuple[int, int], list[float]] = {}
    for run in runs:
        for row in run.results["curve"]:
            if key in row:
                values.setdefault((row["step"], row[by]), []).append(row[key])
    most = max(map(len, values.values()), default=0)
    steps = sorted(step for step, found in values.items() if len(found) == most)
    return [place for _, place in steps], [values[step] for step in steps]


def draw_curve(
    axis: plt.Axes, runs: Sequence[Record], key: str, unit: float, color: str, marker: str, by: str = "epoch"
) -> float:
    """Draw the mean over the runs and a band of one deviation to each side; return the last mean."""
    places, values = read_curve(runs, key, by)
    means = [unit * fmean(found) for found in values]
    axis.plot(places, means, marker, linestyle="-", color=color, markersize=5 if len(places) < 40 else 0)
    if len(runs) > 1:
        bands = [unit * stdev(found) if len(found) > 1 else 0 for found in values]
        low = [mean - band for mean, band in zip(means, bands, strict=True)]
        high = [mean + band for mean, band in zip(means, bands, strict=True)]
        axis.fill_between(places, low, high, color=color, alpha=0.25, linewidth=0)
    return means[-1]


def compute_loss_floor(run: Record) -> float:
    """Return the lowest loss that the label smoothing of a training allows; 0 without smoothing."""
    share, num_classes = run.config["trainer"]["label_smoothing"], run.config["data"]["num_classes"]
    right, wrong = 1 - share + share / num_classes, share / num_classes
    return -right * log(right) - ((num_classes - 1) * wrong * log(wrong) if wrong else 0)


def label_ends(axis: plt.Axes, ends: Iterable[tuple[float, str, str]]) -> None:
    """Write each curve's label to the right of its end, and move labels apart that would overlap."""
    (low, high), place = axis.get_ylim(), -float("inf")
    for end, text, color in sorted(ends):
        place = max((end - low) / (high - low), place + 0.1)
        axis.text(1.02, place, text, transform=axis.transAxes, color=color, va="center")


Lines = Sequence[tuple[str, str, str, Sequence[Record]]]


def draw_curves(pictures: Mapping[str, Lines]) -> None:
    """Draw one row per title: test top-1 on the left, training loss on the right."""
    size = (9, 2.7 * len(pictures))
    _, axes = plt.subplots(len(pictures), 2, figsize=size, layout="constrained", squeeze=False)
    for (top1_axis, loss_axis), (title, lines) in zip(axes, pictures.items(), strict=True):
        for axis, key, unit, form in ((top1_axis, "test/top1", 100, "{:.1f}%"), (loss_axis, "loss", 1, "{:.2f}")):
            ends = []
            for label, color, marker, runs in lines:
                end = draw_curve(axis, runs, key, unit, color, marker)
                ends.append((end, f"{label} {form.format(end)}".strip(), color))
            axis.set_xlabel("epoch")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            if axis is loss_axis and not lines[0][3][0].config["model"]["auxiliary_head"]:  # it adds its own loss
                floor = compute_loss_floor(lines[0][3][0])
                axis.axhline(floor, color="gray", linewidth=1, linestyle=":")
                ends.append((floor, f"floor {floor:.2f}", "gray"))
            label_ends(axis, ends)
        top1_axis.set_ylabel("test top-1, %")
        loss_axis.set_ylabel("training loss, nats")
        top1_axis.set_title(title, loc="left", fontsize=10, pad=12)
    plt.show()


def same_but_seed(one: Record, other: Record) -> bool:
    """Say whether two runs differ at most in their seed."""
    return same_settings({**one.config, "seed": 0}, {**other.config, "seed": 0})


def make_title(runs: Sequence[Record]) -> str:
    """Say what was trained, on what, from where, and how often."""
    model, data = runs[0].config["model"], runs[0].config["data"]
    name = f"AmoebaNet-{model['variant'].upper()} ({model['num_layers']},{model['num_filters']})"
    start = "fine-tuned" if is_tuned(runs[0]) else "from scratch"
    return f"{name} on {titles.get(data['name'], data['name'])}, {data['image_size']} px, {start}; {format_count(runs)}"


def describe_training(runs: Sequence[Record]) -> str:
    """Say in a few sentences how the accuracy of a training rose."""
    epochs, values = read_curve(runs, "test/top1")
    means = [fmean(found) for found in values]
    best, middle = max(range(len(means)), key=means.__getitem__), (len(means) - 1) // 2
    return (
        f"**{make_title(runs)}**: {means[0]:.1%} top-1 after epoch {epochs[0]}, {means[-1]:.1%} at the end, after "
        f"epoch {epochs[-1]}. The best is {means[best]:.1%}, after epoch {epochs[best]}. From epoch {epochs[middle]} "
        f"on: {100 * (means[-1] - means[middle]):+.1f} points."
    )


def draw_starts(found: Mapping[Images, Mapping[str, Start]]) -> None:
    """Draw test top-1 against the steps for both starts: a row per data set, a column per number of images."""
    styles = dict(zip(STARTS, ((Color.FROM_SCRATCH, "D"), (Color.FINE_TUNED, "o")), strict=True))
    sets = {images.data: [one for one in found if one.data == images.data] for images in found}
    size = (len(sets), max(map(len, sets.values())))
    figure, axes = plt.subplots(*size, figsize=(9, 2.6 * size[0]), layout="constrained", squeeze=False)
    for row, in_row in zip(axes, sets.values(), strict=True):
        for axis, images in zip_longest(row, in_row):
            if images is None:
                axis.set_visible(False)
                continue
            for name, start in found[images].items():
                draw_curve(axis, list(start.runs.values()), "test/top1", 100, *styles[name], by="step")
            axis.set_title(str(images), fontsize=9)
            axis.set_xlabel("step")
        row[0].set_ylabel("test top-1, %")
    handles = [Line2D([], [], color=color, marker=marker, label=name) for name, (color, marker) in styles.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    plt.show()


def draw_sizes(found: Mapping[str, Mapping[int, Tuned]]) -> None:
    """Draw top-1 of every run against the parameters of its model, one picture for each set of images."""
    _, axes = plt.subplots(1, len(found), figsize=(9, 3.2), layout="constrained", squeeze=False)
    for axis, (images, sizes) in zip(axes[0], found.items(), strict=True):
        color = Color.FINE_TUNED if any(map(is_tuned, next(iter(sizes.values())).runs.values())) else Color.TRAINING
        parameters = [size.parameters for size in sizes.values()]
        means = [100 * fmean(size.top1.values()) for size in sizes.values()]
        deviations = [100 * stdev(size.top1.values()) if len(size.top1) > 1 else 0 for size in sizes.values()]
        axis.errorbar(parameters, means, yerr=deviations, fmt="_-", color=color, markersize=11, capsize=3)
        for size in sizes.values():
            top1 = [100 * value for value in size.top1.values()]
            axis.plot([1.06 * size.parameters] * len(top1), top1, "o", color=color, markersize=4, markeredgewidth=0)
        axis.set_xscale("log")
        axis.set_xticks(parameters, [f"{number / 1000:,.0f}k" for number in parameters])
        axis.minorticks_off()
        axis.set_xlabel("parameters")
        axis.set_title(images)
    axes[0][0].set_ylabel("test top-1, %")
    plt.show()


def draw_cost(days: Mapping[str, float], counts: Mapping[str, int]) -> None:
    """Draw one hatched bar per data set, for all its runs."""
    _, axis = plt.subplots(figsize=(9, 3.2), layout="constrained")
    for place, (data, of_a_run) in enumerate(days.items()):
        total = counts[data] * of_a_run
        axis.barh(place, total, 0.6, color="white", edgecolor=Color.PLANNED_COST, hatch="///")
        runs = f" = {counts[data]} runs x {of_a_run:.1f}" if counts[data] > 1 else ", one run"
        axis.text(total, place, f"  {total:.1f}{runs}", va="center")
    axis.set_yticks(range(len(days)), [titles.get(data, data) for data in days])
    axis.invert_yaxis()
    axis.set_xlabel("accelerator-days, planned")
    axis.margins(x=0.2)
    plt.show()
