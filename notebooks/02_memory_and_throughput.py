# %% [markdown]
# # What fits, and how fast it runs
#
# A pipeline has two purposes: to hold models that no single device can hold, and to keep all devices busy. The paper
# shows the first in its Table 1, the second in its Tables 2 and 3. This notebook draws our numbers beside the paper's.
# It trains nothing: every number comes from the records in [reproductions](../reproductions), or from the paper.
#
# The [first notebook](01_how_gpipe_works.ipynb) explains the terms stage, boundary, micro-batch, re-materialisation and
# bubble. A model has $K$ stages, a mini-batch $M$ micro-batches. There are three kinds of our numbers, each with its
# own mark:
#
# | kind | what it is | bars | lines and points |
# |---|---|---|---|
# | **planned** | computed from shapes and a device's data sheet; nothing ran | stripes | dashed, open squares |
# | **simulated** | the schedule, with each layer's seconds as measured on one core | lines | solid, small points |
# | **measured** | a real step | filled | filled circles |
#
# The paper's numbers are open diamonds. Those of torchgpipe, another implementation, are crosses.

# %%
import sys

sys.path.insert(0, "..")  # the root of the repository, where `reproductions` is

from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from house_style import show, use_house_style
from IPython import display as page
from throughput_pictures import (
    CUTS,
    GIB,
    SLOW,
    SPEED,
    columns,
    compute_law,
    count_near,
    describe_fit,
    describe_step,
    draw_all_activations,
    draw_all_batches,
    draw_all_measured,
    draw_all_shares,
    draw_capacity,
    draw_deviations_of_plans,
    draw_schedules,
    draw_slow_links,
    draw_table2,
    name_column,
    paper,
    read_step,
    records,
    simulated,
    their_speed_ups,
    titles,
)

from gpipe.planning.picture import plot
from gpipe.records import Record
from reproductions.speed_ups import (
    divide_by_base,
    find_grid,
    grid_speeds,
    key_of,
    measured_runs,
)
from reproductions.table import markdown
from reproductions.table2_throughput.tables import GRID, LAPTOP, name_model
from reproductions.table3_slow_links.tables import GRID as SLOW_GRID

use_house_style()
found = {
    (record.experiment, record.kind, f"{record.hardware['cpu']}, {record.hardware['num_cores']} cores")
    for every in records.values()
    for record in every
}
show("The records:", markdown(["experiment", "kind", "hardware"], sorted(found)))

# %% [markdown]
# ## 1. What fits
#
# ### What a stage holds
#
# Three things take a device's memory in a training step: **parameters** (weights, gradients and the optimiser's state;
# with the paper's RMSProp 12 bytes per parameter), the **stash** (a boundary input for each micro-batch between its
# forward and its backward pass), and the **activations** of the current micro-batch, with what its operations need
# while they run. Their largest sum, the peak, must stay below the red line.
#
# The columns are models of Table 1 with our $M = 32$. The rows are two ways of cutting the layers into stages: the
# paper's rule minimises the variance of the stages' FLOPs; ours minimises the memory of the fullest device.

# %%
draw_capacity()

# %% [markdown]
# AmoebaNet's early layers have large images and few weights, its late layers the opposite. Equal FLOPs therefore put
# most of the weights on the last device, while the first has room to spare. A cut by memory moves layers forward until
# all devices are about equally full. The layers of a Transformer are equal: any sensible cut is the best one, and each
# further device holds the same number of layers. This is why the paper's Transformers grow linearly with $K$.


# %%
header = ["model", "parameters", "device memory, GiB", *(f"fullest, {name}" for name in CUTS.values())]
naive, first = columns["amoebanet", "Naive-1"], columns["amoebanet", "Pipeline-1"]
peaks = [column["cuts"]["memory"]["devices"][0]["peak_bytes"] / GIB for column in (naive, first)]
show(
    "Planned:",
    markdown(header, map(describe_fit, columns.values())),
    f"Re-materialisation and micro-batches help even on one device. {name_column(naive)} keeps all activations of the "
    f"whole mini-batch: {peaks[0]:.1f} GiB by plan. {name_column(first)}, a model "
    f"{first['parameters'] / naive['parameters']:.1f} times as large, recomputes them: {peaks[1]:.1f} GiB.",
)

# %% [markdown]
# ### More micro-batches, less memory
#
# With re-materialisation only one micro-batch at a time has its activations alive. Smaller micro-batches therefore need
# less memory, down to the stash, which holds the boundary inputs of the whole mini-batch for any $M$. The paper does
# not give its $M$; torchgpipe's program has 128. For Transformers another choice matters as much: attention **op by
# op** (unfused) keeps matrices of tokens times tokens, **fused** attention does not.

# %%
draw_all_activations()

# %% [markdown]
# With attention op by op and 16 micro-batches, the Transformers' bars meet the paper's diamonds. The paper may have
# used these settings, but this is a guess. The paper's AmoebaNets, too, are nearest to few and large micro-batches. The
# plans for torchgpipe's 128 are below its crosses. These show what its allocator had reserved, which is more than was
# in use at once.
#
# ### Schedules
#
# GPipe runs all forward passes of a mini-batch before the first backward pass. **1F1B** starts a micro-batch's backward
# pass as soon as it can, so stage $k$ never holds more than $K - k$ micro-batches. **Interleaved** 1F1B also gives each
# device several shorter stages. With two, the bubble of equal stages halves, and the transfers double. **split_gpipe**,
# **zb_h1** and **zb_v** split backward passes, see the first notebook. These are plans for Transformer-48 on eight
# devices of 16 GB, with 32 micro-batches of one sequence:

# %%
draw_schedules()

# %% [markdown]
# Left: with re-materialisation, a micro-batch that waits is a small boundary input, so among GPipe, 1F1B and its
# interleaved variant the schedule hardly matters for memory. ZB-H1 and ZB-V also hold what the gradients of weights
# need. Right: without recomputation, steps are faster, but GPipe overflows the devices, split or not. The others fit.
# With 1F1B the early stages hold most, because they wait longest for their gradients.
#
# ### Can the plan be trusted?
#
# We ran real steps of two small models on the CPU, for all modes of re-materialisation, six schedules and several $K$.
# Each allocation is attributed to the stage at work. A point is a stage.

# %%
off = draw_deviations_of_plans()
show(f"{len(off)} stages: the plan is off by {median(off):.1f}% in the median, and by {max(off):.1f}% at most.")

# %% [markdown]
# These are small models on a CPU. No plan includes the fragmentation of a GPU's allocator, or the memory of its
# libraries.
#
# ## 2. How fast it runs
#
# ### Speed-up with stages and micro-batches
#
# The paper's Table 2 has the throughput of AmoebaNet-D (18,256) and Transformer-48 on TPUs, each relative to its own
# $K = 2$, $M = 1$. Its batch sizes are unknown. Ours are the largest micro-batches that fit, by our plan.
#
# The dotted lines are arithmetic. Let a stage need one unit of time for a micro-batch's forward pass, one for its
# recomputation and two for its backward pass: $4M$ units of work in a step. If recomputation had to wait like the rest,
# the step would take $4 (M + K - 1)$ units, which is $(M + K - 1)/M$ times the work: the **bubble law**. But
# recomputation runs early, while a stage waits for a gradient, so the step takes $4M + 3(K - 1)$ units.


# %%
draw_table2()

# %% [markdown]
# With one micro-batch, more stages gain almost nothing: one works, the others wait. With $M = 32$ the Transformer
# follows the law, on the paper's TPUs as in our plans. With $M = 4$ the paper is above what the law allows for any
# GPipe schedule if a sequence takes the same time for every $K$; we do not know why.
#
# AmoebaNet falls short of the law, because its layers differ. How far depends on the cut: by the seconds of the layers
# it comes near torchgpipe's crosses, by their FLOPs nearer to the paper's diamonds. This table counts the speed-ups of
# a model that are within 20 % of the paper's, without the base, which is 1 by definition. [Table
# 2](../reproductions/table2_throughput/README.md) lists each of them.


# %%
found_by = {
    "law with early recomputation": divide_by_base(
        {key_of(row): compute_law(key_of(row)) for row in paper[SPEED]}, paper[SPEED]
    )
}
for kind in ("planned", "simulated"):
    for cut, of in (("seconds", "seconds"), ("flops", "FLOPs")):
        cells = grid_speeds(find_grid(records[SPEED], GRID, kind), "fits", cut)
        found_by[f"{kind}, cut by {of}"] = divide_by_base(cells, paper[SPEED])
found_by["torchgpipe, measured"] = their_speed_ups
show(
    markdown(["", *titles], [[name, *(count_near(ours, title) for title in titles)] for name, ours in found_by.items()])
)

# %% [markdown]
# ### Where a step's time goes
#
# Shares of a step's time. **Computing** is what a single device would do as well; everything else is the price of the
# pipeline. **Bubble** is the wait that equal stages would still have, **imbalance** what unequal ones add. The black
# ticks are the formula $(K-1)/(M+K-1)$: the bubble stays below them, because recomputation runs early.

# %%
if simulated:
    draw_all_shares()
else:
    show("Not run: `python -m experiments.table2_throughput`.")

# %% [markdown]
# More micro-batches shrink the bubble. The rest is imbalance, which a better cut shrinks. Recomputation is the price
# of the memory in section 1. Transfers hardly count here. The next figure has slower links.
#
# ### Slow links
#
# The paper's Table 3 repeats $M = 32$ on GPUs without fast links, which exchange data over PCI-E. Only activations at
# boundaries travel, so the speed-ups suffer little:

# %%
slow = find_grid(records[SLOW], SLOW_GRID, "simulated")
draw_slow_links()
for model in slow:
    cells = [cell for cell in model["cells"] if (cell["batch"], cell["cut_by"]) == ("fits", "seconds")]
    parts = ", ".join(f"{cell['shares']['transfer']:.1%} with K = {cell['num_stages']}" for cell in cells)
    show(f"**{model['model']}**: simulated, transfers take {parts} of a step.")

# %% [markdown]
# ### Which batch?
#
# A speed-up depends on what is held fixed. The mini-batch may **grow** with $M$ (all micro-batches have 4 examples), be
# **equal** for every $M$ (so micro-batches shrink), or be as large as **fits**. The paper does not say what it did;
# torchgpipe's batch differs for every $K$ and $M$. Simulated, for $M = 32$:

# %%
if simulated:
    draw_all_batches()

# %% [markdown]
# The three differ little here, because a CPU core is about as fast on small micro-batches as on large ones, and the
# simulation uses such a core's seconds. On a GPU or a TPU small micro-batches cost more.
#
# ### Measured, on two cores
#
# All speeds so far are planned or simulated. These are measured: small models in one process per stage, with one core
# each. The bars compare one stage with two; the ticks are the speeds that the law with early recomputation predicts
# from one stage. [The page of Table 2](../reproductions/table2_throughput/README.md#small-models-measured) explains why
# a pair with $M = 1$ may exceed them.


# %%
measured = {
    label: cells
    for batch, label in (("fixed", "mini-batch grows"), ("equal", "equal mini-batch"))
    if (cells := measured_runs(records[SPEED], LAPTOP, batch))
}
if measured:
    draw_all_measured(measured)
else:
    show("Not run yet: `python train.py -m +experiment=table2_throughput_laptop reproduction=table2_throughput`.")

# %% [markdown]
# ## 3. A real step
#
# Finally, the timeline of a real step of each small model, with two stages on two cores and eight micro-batches. Above
# is the **measured** step; below is the **simulated** one: the same schedule, each stage's mean seconds for a forward
# pass, a recomputation and a backward pass, and free transfers. The fastest of several steps is shown, because other
# programs can only slow a step down.

# %%
steps: dict[str, Record] = {}
for record in sorted(records[SPEED], key=lambda record: record.date):
    if record.experiment == "step_timeline":
        steps[name_model(record)] = record
for name, record in steps.items():
    timelines = read_step(record)
    with TemporaryDirectory() as folder:
        plot(timelines, Path(folder) / "step.svg")
        show(f"**{name}**")
        page.display(page.SVG((Path(folder) / "step.svg").read_text("utf-8")))
    show(describe_step(record, timelines))
if not steps:
    show("Not run: `python -m experiments.step_timeline`.")

# %% [markdown]
# The order of the tasks is that of the first notebook: all forward passes, then the backward passes in reverse, and
# recomputation early, while a stage waits for a gradient anyway. Both models were cut by FLOPs. For the Transformer
# these predict the seconds well. AmoebaNet's early layers have few FLOPs for the seconds that they take, so its first
# stage sets the pace and the second one waits for it. That is the imbalance of section 2.
#
# A task much longer than its neighbours was interrupted by another program on these two cores. The simulation uses each
# stage's mean, so it spreads such an interruption over all tasks of the stage.
#
# ## Where to go next
#
# `python plan.py` plans your own model before you launch anything. The pages of the reproductions have the commands,
# the full tables, and our departures from the paper: [Table 1](../reproductions/table1_model_size/README.md), [Table
# 2](../reproductions/table2_throughput/README.md), [Table 3](../reproductions/table3_slow_links/README.md), [the
# bubble](../reproductions/bubble/README.md). Records of new runs go to `runs.jsonl` there. Execute this notebook again
# to see them in the pictures.
