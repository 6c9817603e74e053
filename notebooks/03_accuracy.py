# %% [markdown]
# # How accurate the models are
#
# A pipeline is useful only if the model that it trains is good. The paper shows this in its Table 4: one giant image
# classifier, trained on ImageNet, then fine-tuned on seven other data sets. This notebook puts our runs beside it. It
# trains nothing: every number below comes from the records and from `paper.csv` in
# [reproductions/table4_imagenet_and_transfer](../reproductions/table4_imagenet_and_transfer).
#
# Terms: **top-1** is the share of test images for which the model's first guess is right. **Pre-training** starts from
# random weights; so does training **from scratch**. **Fine-tuning** starts from the weights of a pre-trained model,
# except for the last layer, which is initialised anew for the new classes.
#
# Each kind of number has its own mark. The paper's numbers are open diamonds, measured numbers are filled, planned ones
# are hatched, and anything we did not run is labelled "not run".

# %%
import sys

sys.path.insert(0, "..")  # the root of the repository, where `reproductions` is

from accuracy_pictures import (
    describe_missing,
    describe_training,
    draw_cost,
    draw_curves,
    draw_sizes,
    draw_starts,
    draw_table4,
    explain_not_run,
    format_count,
    make_title,
    paper,
    paper_scale_top1,
    records,
    same_but_seed,
)
from answers import show_answers
from house_style import Color, show, use_house_style

from gpipe.records import Record
from reproductions.table import markdown
from reproductions.table4_imagenet_and_transfer.model_size import PROGRAM, TRAINED, model_size, tuned_sizes
from reproductions.table4_imagenet_and_transfer.tables import (
    claims,
    data_of,
    image_runs,
    table4,
    table4_cost,
    table4_design,
)
from reproductions.table4_imagenet_and_transfer.transfers import FEW, WHOLE, read_starts, transfer_steps

use_house_style()
LONGER_TRAINING = "python train.py +experiment=amoebanet_fashion_mnist_laptop"
PRE_TRAINING = "python train.py +experiment=amoebanet_imagenet_laptop"
TRANSFERS = "python train.py -m +experiment=transfer_table_laptop"
measured = [record for record in records if record.kind == "measured" and "top1" in record.results]
studied = (WHOLE, FEW, *TRAINED.values())  # what sections 3 and 4 show
found: dict[tuple[str, str], list[str]] = {}
for record in records:
    found.setdefault((record.experiment, record.kind), []).append(data_of(record))
rows = [[name, ", ".join(sorted({*sets})), kind, str(len(sets))] for (name, kind), sets in sorted(found.items())]
show("The records:", markdown(["experiment", "data sets", "kind", "records"], rows) if rows else "No record yet.")

# %% [markdown]
# ## 1. Table 4 of the paper
#
# The paper's model is AmoebaNet-B (18,512), cut into four partitions, for images of 480 px. A number of ours appears
# here only if its settings equal those of the paper-scale experiment; a transfer must also be fine-tuned. The program
# compares all settings except the data set, the seed, the initial weights and the machine. The smaller runs further
# down are not in this picture.


# %%
draw_table4()
show(table4(records, paper))

# %%
missing = {row["data"]: explain_not_run(row["data"]) for row in paper if not paper_scale_top1(row["data"])}
show(f"Run at the paper's scale: {len(paper) - len(missing)} of {len(paper)} data sets.", *describe_missing(missing))

# %% [markdown]
# "Deviation" is the sample standard deviation over the runs. Each verdict follows from [the stated
# test](../reproductions/README.md#the-test-behind-a-verdict): an interval, over runs and test images, of how far our
# accuracy is above the paper's minus half a point.
#
# These two commands do the missing runs, the second one all seven transfers with five seeds each. Section 5 shows
# their cost.
#
#     python train.py +experiment=amoebanet_imagenet data.root=<folder of ImageNet>
#     python train.py -m +experiment=transfer_table data.root=<folder of the data sets> init_from=<run of the first>
#
# ## 2. Training curves
#
# After every epoch, or every few, a run evaluates its model on the test images, with the moving averages of its
# weights. The left pictures show this accuracy. The right ones show the loss on the training images: each point is the
# mean over the steps since the previous point. If a training has several seeds, the line is their mean, and the band is
# one standard deviation to each side.
#
# The training loss has a floor. With label smoothing, a share $\varepsilon$ of each target is spread over all $C$
# classes, and even the loss of a perfect model is at least the entropy of such a target,
#
# $$-\left(1 - \varepsilon + \tfrac{\varepsilon}{C}\right) \ln\left(1 - \varepsilon + \tfrac{\varepsilon}{C}\right)
# - (C - 1)\, \tfrac{\varepsilon}{C} \ln \tfrac{\varepsilon}{C}.$$


# %%
"""Label, colour, marker and runs of each curve of a picture."""
trainings: list[list[Record]] = []
for run in measured:
    if run.results.get("curve") and run.experiment not in studied:
        same = next((runs for runs in trainings if same_but_seed(runs[0], run)), None)
        if same is None:
            trainings.append([run])
        else:
            same.append(run)
if trainings:
    draw_curves({make_title(runs): [("", Color.TRAINING, "o", runs)] for runs in trainings})
else:
    show(f"No curve on record. Not run: `{LONGER_TRAINING}`.")

# %%
others = [run for run in measured if run.experiment not in studied]
bare = [run for run in others if not run.results.get("curve")]
show(
    *(describe_training(runs) for runs in trainings),
    f"On record, without those of sections 3 and 4: {format_count(others)}, {len(bare)} of them without a curve.",
    image_runs(measured) if others else "",
)

# %% [markdown]
# ## 3. Transfer, at the scale of a laptop
#
# **Question:** does pre-training help, with all images of another set and with few? **Method:** a small AmoebaNet-B is
# pre-trained on photographs of clothes, then fine-tuned on handwritten digits. Beside it, the same model learns the
# digits from scratch, with the same steps and seeds, so that each seed makes a pair. The settings are the same except
# for the learning rate, which 100 other images choose for each start. This follows the paper with small data. It says
# nothing about the paper's numbers. The first table has the budget and the tuning of each study.


# %%
show(table4_design(records, paper))

# %% [markdown]
# A line is the mean over the seeds, and the band one standard deviation to each side: how runs differ by their images
# and by chance.


# %%
if starts := read_starts(records):
    draw_starts(starts)
else:
    show(f"Not run: `{PRE_TRAINING}`, then `{TRANSFERS} init_from=<its run>` and `{TRANSFERS} init_from=null`.")

# %% [markdown]
# The last column of a start is how far its accuracy rises from half of the steps to all, with its interval; a wide
# interval does not prove convergence. A gain is the difference of two rows, in points of top-1. Its verdict is the one
# after all steps.

# %%
show(transfer_steps(records))
show_answers(claims(records, paper), "pre-training helps")

# %% [markdown]
# Most seeds of a row share one checkpoint, and all share one set of test images. The intervals therefore measure the
# chance in training and in the draw of images, not how another pre-training would do.
#
# **What would change the answer:** a pre-training on more than 6,000 photographs, or on images that resemble the
# target.
#
# ## 4. Accuracy against size, at the scale of a laptop
#
# **Question:** are larger models more accurate, also after a transfer? The paper's figure 1(a) shows the former among
# models of several families. **Method:** five sizes of one family learn the photographs of clothes, each at the
# learning rate that is best on held-out images, and are then fine-tuned on 100 handwritten digits. The axis of
# parameters is logarithmic; a point is a seed, and a bar shows the mean and one deviation to each side. The gain of a
# seed is the slope of a line through its five accuracies; the verdict is over seeds.

# %%
sizes = {images: by_size for images, name in TRAINED.items() if (by_size := tuned_sizes(measured, name))}
if sizes:
    draw_sizes(sizes)
    show(model_size(measured))
    show_answers(claims(records, paper), "figure 1a")
else:
    show(f"Not run: `{PROGRAM}`.")

# %% [markdown]
# **What would change the answer:** larger models than a laptop can train, and more steps. Here all models see the same
# number of images, five times each.
#
# ## 5. What the paper's runs would cost
#
# **Planned, not measured.** The floating-point operations of an image's forward pass are counted on a description of
# the model, without weights. A training step takes a multiple of them: forward, recomputation, and a backward of twice
# the forward. An accelerator-day is one day of one accelerator at an assumed speed.

# %%
RUNS_OF_A_TRANSFER = 5  # the paper's accuracies are means of five runs (section 4)
plans = [record for record in records if record.kind == "planned" and record.experiment == "table4_cost"]
if plans:
    plan = max(plans, key=lambda record: record.date)
    days = {row["data"]: row["accelerator_days"] for row in plan.results["rows"]}
    counts = {data: 1 if data == "imagenet" else RUNS_OF_A_TRANSFER for data in days}
    draw_cost(days, counts)
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
# The reproduction's [README](../reproductions/table4_imagenet_and_transfer/README.md) has the commands, our departures
# from the paper, and our choices where it leaves something open. The record of a new run goes to `runs.jsonl` there.
# Execute this notebook again to see the run in the pictures.
