# %% [markdown]
# # How accurate the models are
#
# A pipeline is useful only if the model that it trains is good. The paper shows this in its Table 4: one giant image
# classifier, trained on ImageNet, then fine-tuned on seven other data sets. This notebook puts our runs beside it. It
# trains nothing: every number below comes from the records and from `paper.csv` in
# [reproductions/table4_imagenet_and_transfer](../reproductions/table4_imagenet_and_transfer).
#
# Terms: **top-1** is the share of the test images whose first guess is right. **Pre-training** begins with random
# weights; so does training **from scratch**. **Fine-tuning** begins with the weights of a pre-trained model, except
# for the last layer, which is drawn anew for the new classes.
#
# A record states the kind of its numbers, and each kind has its own mark. The paper's numbers are open diamonds,
# measured numbers are filled, planned ones are hatched, and anything we did not run is labelled "not run".

# %%
import sys

sys.path.insert(0, "..")  # the root of the repository, where `reproductions` is

from collections.abc import Iterable, Mapping, Sequence
from math import log, sqrt
from pathlib import Path
from statistics import fmean, stdev

import matplotlib.pyplot as plt
from IPython import display as page
from matplotlib.ticker import MaxNLocator

from gpipe.records import Record, read_records, same_settings
from reproductions import RUNS_FILE
from reproductions.pages import read_paper
from reproductions.table import markdown
from reproductions.table4_imagenet_and_transfer.tables import (
    LAPTOP_TRANSFERS,
    data_of,
    image_runs,
    is_tuned,
    paper_scale_runs,
    reason_not_run,
    small_transfers,
    table4,
    table4_cost,
    transfer_laptop,
)

BLUE, OCHRE, GREEN = "#4878a8", "#96750f", "#7d9d5b"
plt.rcParams.update({"figure.dpi": 80, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})

FOLDER = Path("../reproductions/table4_imagenet_and_transfer")
PRE_TRAINING = "python train.py +experiment=amoebanet_fashion_mnist_laptop"
TRANSFERS = "python train.py -m +experiment=transfer_table_laptop"

records, paper = read_records(FOLDER / RUNS_FILE), read_paper(FOLDER)
titles = {row["data"]: row["title"] for row in paper}


def show(*paragraphs: str) -> None:
    """Show Markdown: each argument is a paragraph or a table."""
    page.display(page.Markdown("\n\n".join(paragraphs)))


def format_spread(values: Sequence[float]) -> str:
    """Write shares as mean and sample deviation."""
    return f"{fmean(values):.2%}" + (f" ± {100 * stdev(values):.2f}" if len(values) > 1 else "")


def format_count(runs: Sequence[object]) -> str:
    """Write how many runs there are."""
    return f"{len(runs)} run{'s' * (len(runs) != 1)}"


measured = [record for record in records if record.kind == "measured" and "top1" in record.results]
found: dict[tuple[str, str], list[str]] = {}
for record in records:
    found.setdefault((record.experiment, record.kind), []).append(data_of(record))
rows = [[name, ", ".join(sorted({*sets})), kind, str(len(sets))] for (name, kind), sets in sorted(found.items())]
show("What there is:", markdown(["experiment", "data sets", "kind", "records"], rows) if rows else "No record yet.")

# %% [markdown]
# ## 1. Table 4 of the paper
#
# The paper's model is AmoebaNet-B (18,512), cut into four partitions, for images of 480 px. Our number stands here
# only if its settings equal those of the paper-scale experiment; a transfer must also be fine-tuned. The program
# compares all settings except the data set, the seed, the initial weights and the machine. The smaller runs further
# down never enter this picture.


# %%
def paper_scale_top1(data: str) -> list[float]:
    """Return top-1 of each run that counts beside the paper's."""
    return [run.results["top1"] for run in paper_scale_runs(records, data)]


def explain_not_run(data: str) -> str:
    """Return the reason on record why a data set was not run."""
    return reason_not_run(records, data) or "no attempt on record"


def draw_table4(axis: plt.Axes) -> None:
    """Draw one row per data set: the paper's accuracy, and ours or why there is none."""
    beyond = axis.get_yaxis_transform()  # x in widths of the axis
    for place, row in enumerate(paper):
        expected, ours = float(row["top1"]), paper_scale_top1(row["data"])
        axis.plot(expected, place, "D", color="dimgray", markersize=8, fillstyle="none")
        label = f"{'' if place else 'paper: '}{expected:.1f}"
        axis.text(expected, place - 0.28, label, color="dimgray", ha="center", va="bottom")
        if ours:
            deviation = 100 * stdev(ours) if len(ours) > 1 else None
            axis.errorbar(100 * fmean(ours), place, xerr=deviation, fmt="o", color=BLUE, markersize=6, capsize=3)
            text, style = f"{format_spread(ours)}, {format_count(ours)}", {"color": BLUE}
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


_, axis = plt.subplots(figsize=(9, 4.2), layout="constrained")
draw_table4(axis)
plt.show()
show(table4(records, paper))


# %%
def describe_missing(reasons: Mapping[str, str]) -> list[str]:
    """Say what was not run, in one sentence per reason."""
    return [
        f"Not run, {reason}: {', '.join(titles.get(data, data) for data in reasons if reasons[data] == reason)}."
        for reason in dict.fromkeys(reasons.values())
    ]


missing = {row["data"]: explain_not_run(row["data"]) for row in paper if not paper_scale_top1(row["data"])}
show(f"Run at the paper's scale: {len(paper) - len(missing)} of {len(paper)} data sets.", *describe_missing(missing))

# %% [markdown]
# "Deviation" is the sample standard deviation over the runs. Each verdict follows from
# [the stated test](../reproductions/README.md#the-test-behind-a-verdict): a bootstrap over runs and test images of how
# far our accuracy is above the paper's less half a point.
#
# These two commands make the missing runs, the second one all seven transfers with five seeds each. Section 4 shows
# their cost.
#
#     python train.py +experiment=amoebanet_imagenet data.root=<folder of ImageNet>
#     python train.py -m +experiment=transfer_table data.root=<folder of the data sets> init_from=<run of the first>
#
# ## 2. How the trainings went
#
# After each epoch, or every few, a run evaluates its model on the test images, with the moving averages of its weights.
# The left pictures show that. The right ones show the loss on the training images: each point is the mean over the
# steps since the previous point. If a training has several seeds, the line is their mean, and the band is one standard
# deviation to each side.
#
# The training loss has a floor. With label smoothing, a share $\varepsilon$ of each target is spread over all $C$
# classes, and even a model that never errs is left with the entropy of such a target,
#
# $$-\left(1 - \varepsilon + \tfrac{\varepsilon}{C}\right) \ln\left(1 - \varepsilon + \tfrac{\varepsilon}{C}\right)
# - (C - 1)\, \tfrac{\varepsilon}{C} \ln \tfrac{\varepsilon}{C}.$$


# %%
def read_curve(runs: Iterable[Record], key: str) -> tuple[list[int], list[list[float]]]:
    """Return the epochs at which all runs have a figure, and the runs' figures at each."""
    values: dict[tuple[int, int], list[float]] = {}
    for run in runs:
        for row in run.results["curve"]:
            if key in row:
                values.setdefault((row["step"], row["epoch"]), []).append(row[key])
    most = max(map(len, values.values()), default=0)
    steps = sorted(step for step, found in values.items() if len(found) == most)
    return [epoch for _, epoch in steps], [values[step] for step in steps]


def draw_curve(axis: plt.Axes, runs: Sequence[Record], key: str, unit: float, color: str, marker: str) -> float:
    """Draw the mean over the runs and a band of one deviation to each side; return the last mean."""
    epochs, values = read_curve(runs, key)
    means = [unit * fmean(found) for found in values]
    axis.plot(epochs, means, marker, linestyle="-", color=color, markersize=5 if len(epochs) < 40 else 0)
    if len(runs) > 1:
        bands = [unit * stdev(found) if len(found) > 1 else 0 for found in values]
        low = [mean - band for mean, band in zip(means, bands, strict=True)]
        high = [mean + band for mean, band in zip(means, bands, strict=True)]
        axis.fill_between(epochs, low, high, color=color, alpha=0.25, linewidth=0)
    return means[-1]


def compute_loss_floor(run: Record) -> float:
    """Return the least loss that the label smoothing of a training allows; 0 without smoothing."""
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
"""Label, colour, marker and runs of each curve of a picture."""


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


trainings: list[list[Record]] = []
for run in measured:
    if run.results.get("curve") and run.experiment not in LAPTOP_TRANSFERS:
        same = next((runs for runs in trainings if same_but_seed(runs[0], run)), None)
        if same is None:
            trainings.append([run])
        else:
            same.append(run)
if trainings:
    draw_curves({make_title(runs): [("", BLUE, "o", runs)] for runs in trainings})
else:
    show(f"No curve on record. Not run: `{PRE_TRAINING}`.")


# %%
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


others = [run for run in measured if run.experiment not in LAPTOP_TRANSFERS]
bare = [run for run in others if not run.results.get("curve")]
show(
    *(describe_training(runs) for runs in trainings),
    f"On record, small transfers apart: {format_count(others)}, {len(bare)} of them without a curve.",
    image_runs(measured) if others else "",
)

# %% [markdown]
# ## 3. Transfer, at the scale of a laptop
#
# Does pre-training help? A small AmoebaNet-B is pre-trained on photographs of clothes, then fine-tuned on handwritten
# digits. Beside it, the same model learns the digits from scratch, with the same settings, budget and seeds, so that
# each seed makes a pair. This is the paper's path with small data. It says nothing about the paper's numbers.


# %%
STARTS = {False: ("from scratch", OCHRE, "D"), True: ("fine-tuned", BLUE, "o")}


def draw_points(axis: plt.Axes, place: float, values: Sequence[float], tuned: bool) -> None:
    """Draw the mean and deviation of runs, and below them each run as a point at its own height."""
    label, color, marker = STARTS[tuned]
    heights = [place + 0.1 + 0.05 * seed for seed in range(len(values))]
    axis.plot([100 * value for value in values], heights, marker, color=color, markersize=5, markeredgewidth=0)
    mean, deviation = 100 * fmean(values), 100 * stdev(values) if len(values) > 1 else 0
    axis.errorbar(mean, place, xerr=deviation, fmt="|", color=color, markersize=11, markeredgewidth=2, capsize=3)
    text = f"{label}: {format_spread(values)}, {format_count(values)}"
    axis.text(1.02, place + 0.1, text, transform=axis.get_yaxis_transform(), color=color, va="center")


# As in the generated table: a learning rate each, and of two runs with the same seed the later record counts.
small = [run for run in measured if run.experiment in LAPTOP_TRANSFERS]
transfers: dict[str, dict[bool, dict[int, Record]]] = {
    f"{data}, rate {rate:g}": {False: scratch, True: tuned}
    for (data, rate), (scratch, tuned) in small_transfers(small).items()
}

if transfers:
    _, axis = plt.subplots(figsize=(9, 0.7 + 1.4 * len(transfers)), layout="constrained")
    for place, starts in enumerate(transfers.values()):
        for tuned, runs in starts.items():
            if top1 := [run.results["top1"] for run in runs.values()]:
                draw_points(axis, place + (-0.4 if tuned else 0.05), top1, tuned)
    axis.set_yticks(range(len(transfers)), list(transfers))
    axis.set_ylim(len(transfers) - 0.5, -0.6)
    axis.set_xlabel("test top-1, %; a point is a seed, a bar the mean and a deviation to each side")
    plt.show()
machines = {(run.hardware["cpu"], run.hardware["num_cores"], *run.hardware["gpus"]) for run in small}
unmade = [record for record in records if record.kind == "not run" and record.experiment in LAPTOP_TRANSFERS]
show(
    transfer_laptop(small) if small else "No transfer on record.",
    *(
        f"Measured on {cpu}, {num_cores} cores{''.join(f', {gpu}' for gpu in gpus)}."
        for cpu, num_cores, *gpus in machines
    ),
    *describe_missing({data_of(record): record.results["reason"] for record in unmade}),
)


# %%
def describe_transfer(data: str, scratch: Mapping[int, Record], tuned: Mapping[int, Record]) -> str:
    """Say in a few sentences what fine-tuning gained, and how certain that is."""
    seeds = sorted(tuned.keys() & scratch.keys())
    if not seeds:
        return f"**{data}**: {'training from scratch' if tuned else 'fine-tuning'} was not run with the other's seeds."
    gains = [100 * (tuned[seed].results["top1"] - scratch[seed].results["top1"]) for seed in seeds]
    starts = [[{**runs[seed].config, "init_from": None} for runs in (scratch, tuned)] for seed in seeds]
    worth = ""
    if len(gains) > 1 and stdev(gains) > 0:
        errors = fmean(gains) / (stdev(gains) / sqrt(len(gains)))
        worth = f", with a deviation of {stdev(gains):.2f}: the mean is {errors:.1f} standard errors from 0"
    return (
        f"**{data}**: with {sum(gain > 0 for gain in gains)} of {len(seeds)} seeds fine-tuning was better. The gain is "
        f"{fmean(gains):+.2f} points in the mean{worth}. Settings that differ in nothing but the first weights: "
        f"{sum(same_settings(*pair) for pair in starts)} of {len(seeds)} pairs."
    )


if transfers:
    show(*(describe_transfer(data, starts[False], starts[True]) for data, starts in transfers.items()))
else:
    show(f"Not run: `{PRE_TRAINING}`, then `{TRANSFERS} init_from=<its run>` and `{TRANSFERS} init_from=null`.")

# %% [markdown]
# All seeds share one checkpoint and one set of test images. The deviation therefore measures the chance in training,
# not how other images or another pre-training would do.
#
# The curves show when the gain comes: the sooner fine-tuning reaches the final accuracy of training from scratch, the
# more of the budget pre-training has saved.


# %%
def select_with_curves(runs: Mapping[int, Record]) -> list[Record]:
    """Return the runs whose records have a curve."""
    return [run for run in runs.values() if run.results.get("curve")]


def describe_lead(data: str, scratch: Sequence[Record], tuned: Sequence[Record]) -> str:
    """Say when fine-tuning reached the final accuracy of training from scratch."""
    epochs, values = read_curve(tuned, "test/top1")
    means, goal = [fmean(found) for found in values], fmean(read_curve(scratch, "test/top1")[1][-1])
    start = fmean(read_curve(scratch, "test/top1")[1][0])
    passed = [epoch for epoch, mean in zip(epochs, means, strict=True) if mean >= goal]
    text = f"**{data}**: after epoch {epochs[0]}, {means[0]:.1%} fine-tuned and {start:.1%} from scratch. "
    when = f"after epoch {passed[0]} of {epochs[-1]}" if passed else "at no time"
    return f"{text}Training from scratch ends at {goal:.1%}; fine-tuning is there {when}."


pictures: dict[str, Lines] = {}
for data, starts in transfers.items():
    lines = [(*STARTS[tuned], runs) for tuned in (True, False) if (runs := select_with_curves(starts[tuned]))]
    if lines:
        pictures[data] = lines
if pictures:
    draw_curves(pictures)
    pairs = {
        data: (select_with_curves(starts[False]), select_with_curves(starts[True]))
        for data, starts in transfers.items()
    }
    show(*(describe_lead(data, *pair) for data, pair in pairs.items() if all(pair)))
else:
    show("No curve on record.")

# %% [markdown]
# ## 4. What the paper's runs would cost
#
# **Planned, not measured.** The floating-point operations of an image's forward pass are counted on a description of
# the model, without weights. A training step takes a multiple of them: forward, recomputation, and a backward of twice
# the forward. An accelerator-day is a day of one accelerator at a speed that we assume.

# %%
RUNS_OF_A_TRANSFER = 5  # the paper's accuracies are the mean of so many (section 4)


def draw_cost(axis: plt.Axes, days: Mapping[str, float], counts: Mapping[str, int]) -> None:
    """Draw one hatched bar per data set, for all its runs."""
    for place, (data, of_a_run) in enumerate(days.items()):
        total = counts[data] * of_a_run
        axis.barh(place, total, 0.6, color="white", edgecolor=GREEN, hatch="///")
        runs = f" = {counts[data]} runs x {of_a_run:.1f}" if counts[data] > 1 else ", one run"
        axis.text(total, place, f"  {total:.1f}{runs}", va="center")
    axis.set_yticks(range(len(days)), [titles.get(data, data) for data in days])
    axis.invert_yaxis()
    axis.set_xlabel("accelerator-days, planned")
    axis.margins(x=0.2)


plans = [record for record in records if record.kind == "planned" and record.experiment == "table4_cost"]
if plans:
    plan = max(plans, key=lambda record: record.date)
    days = {row["data"]: row["accelerator_days"] for row in plan.results["rows"]}
    counts = {data: 1 if data == "imagenet" else RUNS_OF_A_TRANSFER for data in days}
    _, axis = plt.subplots(figsize=(9, 3.2), layout="constrained")
    draw_cost(axis, days, counts)
    plt.show()
    total, speed = sum(counts[data] * days[data] for data in days), plan.config["sustained_flops"] / 1e12
    steps = {(row["steps"], row["batch_size"]) for row in plan.results["rows"] if row["data"] != "imagenet"}
    show(
        f"Planned: {total:,.0f} accelerator-days for all of Table 4, {days['imagenet']:,.0f} of them for ImageNet. "
        f"Assumed: {speed:.0f} TFLOP/s, sustained, and {plan.config['passes']} times the forward pass per step.",
        *(f"Each transfer takes {number:,} steps of {size} images." for number, size in steps if len(steps) == 1),
    )
show(table4_cost(plans))

# %% [markdown]
# ## Where to go next
#
# The reproduction's [README](../reproductions/table4_imagenet_and_transfer/README.md) has the commands, and where our
# recipe departs from the paper or fills what it leaves open. The record of a new run goes to `runs.jsonl` there.
# Execute this notebook again to see the run in the pictures.
