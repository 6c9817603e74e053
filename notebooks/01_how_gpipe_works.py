# %% [markdown]
# # How GPipe works
#
# A model that is too large for one device can be cut into pieces, one per device. But the pieces need each other's
# results, so only one of them works at any moment. GPipe lets them work at the same time. This notebook shows how,
# first in theory, then with a real network. It runs on one core in less than a minute.
#
# Terms: a model is a sequence of $L$ **layers**. Consecutive layers form $K$ **partitions**; a partition on its device
# is a **stage**. Between two stages is a **boundary**. A **mini-batch** of $N$ examples makes one update of the
# weights; it is cut into $M$ equal **micro-batches**.

# %%
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice

import torch
from house_style import use_house_style
from schedule_pictures import (
    compute_bubble,
    draw,
    draw_all_bubbles,
    draw_all_held,
    draw_losses,
    simulate_split_steps,
    simulate_step,
)
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import gpipe
from gpipe.data import ImageLoader, evaluation_transform, open_image_set
from gpipe.pipeline.partition import partition_ranges
from gpipe.pipeline.schedule import Rematerialize
from gpipe.pipeline.schedule import gpipe as gpipe_schedule
from gpipe.planning.simulation import simulate

use_house_style()
torch.set_num_threads(1)

# %% [markdown]
# ## 1. The schedule
#
# The **schedule** is the order of each stage's tasks in a step. GPipe's has the forward pass of every micro-batch,
# then the backward pass of every micro-batch in reverse. Every stage has the same list. `F2` is the forward pass of
# micro-batch 2, `B2` its backward pass.


# %%
def print_schedule(num_stages: int, num_microbatches: int, rematerialize: Rematerialize) -> None:
    """Print the tasks of each stage in order."""
    for stage, tasks in enumerate(gpipe_schedule(num_stages, num_microbatches, rematerialize)):
        print(f"stage {stage}:", *(f"{task.kind[0].upper()}{task.micro_batch}" for task in tasks))


print_schedule(4, 4, Rematerialize.NEVER)

# %% [markdown]
# A stage starts a task when it is next in its list and the neighbour's result has arrived: a forward pass waits for
# the stage before, a backward pass for the stage after. The order alone therefore decides when everything happens,
# and we can compute it. Let the whole mini-batch cost each stage 8 ms forward and 16 ms backward, for any M.

# %%
draw(
    {
        "M = 1, naive": simulate_step(4, 1),
        "M = 4": simulate_step(4, 4),
        "M = 8": simulate_step(4, 8),
    }
)

# %% [markdown]
# A row is a stage, a box is a task, the number in it is the micro-batch. With $M = 1$ one stage works while three
# wait: four devices are no faster than one. With more micro-batches a stage passes on its first result early and
# starts the next one. The work is the same in all three pictures; only the waiting shrinks.
#
# All micro-batches use the same weights, and their gradients are added up before the one update. The next step's work
# therefore cannot fill the wait between forward and backward. In return, the update does not depend on how the model
# is cut.
#
# ## 2. The bubble
#
# The **bubble** is the share of the devices' time that is spent waiting. With equal stages it is
#
# $$\text{bubble} = \frac{K - 1}{M + K - 1},$$
#
# because a stage works on $M$ micro-batches, and waits for as long as $K - 1$ more would take: the first stage in the
# middle, the last stage until the first micro-batch reaches it and after it has sent its last gradient.
#
# A stage that keeps everything for its backward passes soon runs out of memory. **Re-materialisation** keeps only the
# boundary input of each micro-batch, and runs the forward pass again (recompute, `R`) just before the backward pass.

# %%
print_schedule(4, 4, Rematerialize.ALWAYS)

# %% [markdown]
# A recomputation does not need the gradient from the next stage. It therefore runs early, while the stage waits for
# that gradient:

# %%
draw(
    {
        "M = 8, all kept": simulate_step(4, 8, Rematerialize.NEVER),
        "M = 8, re-materialised": simulate_step(4, 8, Rematerialize.ALWAYS),
    }
)

# %% [markdown]
# Recomputation makes the step longer, but by less than its own time: part of it falls into the bubble. With forward
# passes of $F$ seconds, recomputations of $R = F$ and backward passes of $B = 2F$, the step takes
# $(M + K - 1)(F + B) + M R$ instead of $(M + K - 1)(F + B + R)$, and the bubble shrinks to
#
# $$\frac{(K - 1)(F + B)}{(M + K - 1)(F + B) + M R} = \frac{K - 1}{\frac{4}{3} M + K - 1}.$$
#
# Both formulas as lines, and simulated steps of the schedule as points:


# %%
draw_all_bubbles()

# %% [markdown]
# With more stages the bubble grows, with more micro-batches it shrinks. From $M = 4K$ on (rings) it is small. But $M$
# cannot grow forever: a device is inefficient on a micro-batch of a few examples.
#
# ### Less bubble than GPipe
#
# Half of a backward pass computes the gradients that the previous stage waits for. The other half computes those of the
# weights, which no stage waits for. Later schedules split the two and let the second half (pale) fill the gaps. With
# GPipe's order this shortens the end of the step. ZB-H1 has the order of 1F1B. ZB-V also gives each device two stages,
# which go down the devices and back up. Here the three parts of a micro-batch take one millisecond each:

# %%
draw(simulate_split_steps(4, 8))

# %% [markdown]
# Splitting changes no bit of the gradients. Only the order in which micro-batches are added up differs: from last to
# first in GPipe, from first to last in 1F1B, ZB-H1 and ZB-V. So between these two, gradients differ by rounding. ZB-H1
# and ZB-V hold no more micro-batches than 1F1B, but also what the second halves still need: in the [planned
# example](../reproductions/bubble/README.md) the fullest device of ZB-H1 needs a quarter more memory without
# re-materialisation. In practice the parts are not equally long, and splitting itself takes time.
#
# ## 3. A real pipeline
#
# `gpipe.Pipeline` executes the same schedule. Here one process plays all four stages in turn, on one core: nothing
# gets faster, but we can look at everything. With one process per stage, the same tasks run in parallel.
#
# The model is a plain `nn.Sequential` of ten layers, with batch norm and dropout. It is built on the meta device, that
# is, only described: the pipeline fills in the weights, drawn from the seed and the layer's index.


# %%
def make_convolution(num_inputs: int, num_outputs: int, stride: int = 1) -> nn.Sequential:
    """Build one layer of the model: convolution, batch norm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(num_outputs), nn.ReLU()
    )


def describe_model() -> nn.Sequential:
    """Describe a small network for images of 28 px, without weights."""
    with torch.device("meta"):
        layers = nn.Sequential(
            make_convolution(1, 12),
            make_convolution(12, 12),
            make_convolution(12, 12),
            make_convolution(12, 24, stride=2),
            make_convolution(24, 24),
            make_convolution(24, 24),
            make_convolution(24, 48, stride=2),
            make_convolution(48, 48),
            make_convolution(48, 48),
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(48, 10)),
        )
    return gpipe.convert_batch_norm(layers)  # statistics per micro-batch, moving averages per mini-batch


N, M, K = 64, 8, 4
costs = gpipe.analyze_layers(describe_model(), torch.empty(N // M, 1, 28, 28, device="meta"))
partitions = gpipe.partition_layers([cost.flops for cost in costs], K)
print("stage  layer  MFLOP  parameters  output, kB   (of one micro-batch, forward)")
for stage, indices in enumerate(partition_ranges(partitions)):
    for index in indices:
        cost = costs[index]
        print(f"{stage:5}{index:7}{cost.flops / 1e6:7.1f}{cost.parameters:12,}{cost.output_bytes / 1e3:12.1f}")
    print(f"{'':12}{sum(costs[index].flops for index in indices) / 1e6:7.1f}  in total")

# %% [markdown]
# The slowest stage sets the pace of all. The layers are therefore cut by cost, here FLOPs, so that the most expensive
# partition is as cheap as possible. Only what the last layer of a partition returns crosses a boundary.
#
# The data: 6,000 product photographs from Fashion-MNIST, which come with the package. A step takes a mini-batch and
# leaves its gradients in `.grad`; the rest is plain PyTorch. The step's report has the loss, how long it took, and the
# peak memory of the process.

# %%
transform = evaluation_transform(28, channels=1, center_crop=1.0)
photographs = ImageLoader(
    open_image_set("fashion_mnist_embedded", "train"), N, transform, seed=0, shuffle=True, num_workers=0
)
mini_batch = next(iter(photographs))


def make_pipeline(num_stages: int, num_microbatches: int, rematerialize: str) -> gpipe.Pipeline:
    """Build a pipeline that plays all its stages in this process."""
    partitions = gpipe.partition_layers([cost.flops for cost in costs], num_stages)
    return gpipe.Pipeline(
        describe_model(), nn.functional.cross_entropy, partitions, num_microbatches, rematerialize=rematerialize
    )


print(make_pipeline(K, M, "always").train_step(mini_batch))

# %% [markdown]
# ### The same gradients, to the last bit
#
# How a model is cut, and what it recomputes, must not change what it learns. It does not: every gradient and every
# moving average of the batch norms is bitwise the same, and so are the dropout masks. They are drawn from the seed, the
# step, the micro-batch and the layer, no matter which stage runs that layer or how often.


# %%
def compute_results(num_stages: int, rematerialize: str) -> dict[str, Tensor]:
    """Return all gradients and moving averages after one step."""
    pipeline = make_pipeline(num_stages, M, rematerialize)
    pipeline.train_step(mini_batch)
    gradients = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
    return gradients | dict(pipeline.layers.named_buffers())


expected = compute_results(1, "never")
for num_stages in (1, 2, 4):
    for mode in ("never", "except_last", "always"):
        found = compute_results(num_stages, mode)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        print(f"K = {num_stages}, re-materialise {mode:11}: all {len(found)} tensors equal")

# %% [markdown]
# `except_last` keeps the activations of the micro-batch whose backward pass comes first, because recomputing them would
# save little memory.
#
# $M$ does matter here: batch norm normalises each micro-batch by its own statistics, and each micro-batch has its own
# dropout masks. Without these two kinds of layers, $M$ changes only the rounding of sums.
#
# ### Training

# %%
pipeline = make_pipeline(K, M, "always")
optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.003)
losses = []
for batch in islice(photographs, 60):
    optimizer.zero_grad()
    losses.append(pipeline.train_step(batch).loss)
    optimizer.step()
test_set = open_image_set("fashion_mnist_embedded", "test")
images, labels = next(iter(ImageLoader(test_set, 1000, transform, seed=0, shuffle=False, num_workers=0)))
correct = (pipeline.evaluate(images).argmax(dim=1) == labels).double().mean().item()
draw_losses(losses, correct)
assert sum(losses[-10:]) < 0.7 * sum(losses[:10])

# %% [markdown]
# ### When each task ran
#
# The pipeline can record a step. Below is a measured one, in which the stages take turns (the fastest of ten, because
# other programs slow some of them down), and a simulation with the same mean time for each stage's tasks, but with four
# devices and free transfers.

# %%
recorded = [pipeline.train_step(mini_batch, record_timeline=True).timeline for _ in range(10)]
measured = min(recorded, key=lambda timeline: timeline.makespan_seconds)
simulated = simulate(gpipe_schedule(K, M), measured.mean_seconds())
print(f"bubble by the formula, if the stages were equal: {compute_bubble(K, M, Rematerialize.ALWAYS):.1%}")
draw({"measured, one process plays four stages": measured, "simulated, four devices": simulated})

# %% [markdown]
# In one process the bubble has no meaning: three of four stages always wait. On four devices it differs from the
# formula because the stages take different times, which FLOPs predict only roughly.
#
# Note the recomputations. With its own device, a stage recomputes early. In one process that would gain nothing, so
# each recomputation comes right before its backward pass.
#
# ## 4. Memory
#
# What must a stage hold for its backward passes? Without re-materialisation, the activations of all micro-batches. With
# it, the boundary inputs of all micro-batches, and the activations of the one that was just recomputed.
#
# We measure it in a real step. When a stage has finished a forward pass or a recomputation, we add up the bytes of its
# stored boundary inputs and of the tensors that autograd saved in it, if they are still alive. Memory that several of
# them share counts once. We do not count weights, gradients, or what an operation needs only while it runs.


# %%
@contextmanager
def record_held_bytes(pipeline: gpipe.Pipeline) -> Iterator[list[tuple[int, int]]]:
    """Yield each stage's peak of held bytes so far, and how many of them were boundary inputs."""
    peaks = [(0, 0)] * pipeline.num_stages
    boundary: list[dict[StorageWeakRef, int]] = [{} for _ in peaks]
    saved: list[dict[StorageWeakRef, int]] = [{} for _ in peaks]
    tensors = chain(pipeline.layers.parameters(), pipeline.layers.buffers())
    weights = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}
    current = 0  # the stage at work

    def note(tensor: Tensor, held: dict[StorageWeakRef, int]) -> None:
        storage = tensor.untyped_storage()
        if (reference := StorageWeakRef(storage)) not in weights:  # it tells when the memory is freed
            held[reference] = storage.nbytes()

    def save(tensor: Tensor) -> Tensor:
        note(tensor, saved[current])
        return tensor

    def enter(stage: int, boundary_input: Tensor) -> None:
        nonlocal current
        current = stage
        note(boundary_input, boundary[stage])

    def leave(stage: int) -> None:
        for held in (boundary, saved):
            held[stage] = {reference: size for reference, size in held[stage].items() if not reference.expired()}
        total = sum((boundary[stage] | saved[stage]).values())
        peaks[stage] = max(peaks[stage], (total, sum(boundary[stage].values())))

    hooks = []
    for stage, indices in enumerate(partition_ranges(pipeline.partitions)):
        first, last = pipeline.layers[str(indices[0])], pipeline.layers[str(indices[-1])]
        hooks.append(first.register_forward_pre_hook(lambda _, inputs, stage=stage: enter(stage, inputs[0])))
        hooks.append(last.register_forward_hook(lambda *_, stage=stage: leave(stage)))
    with saved_tensors_hooks(save, lambda tensor: tensor):
        yield peaks
    for hook in hooks:
        hook.remove()


def measure_held(num_microbatches: int, rematerialize: str) -> list[tuple[int, int]]:
    """Measure what each of K stages holds in a step."""
    pipeline = make_pipeline(K, num_microbatches, rematerialize)
    with record_held_bytes(pipeline) as peaks:
        pipeline.train_step(mini_batch)
    return peaks


counts = [1, 2, 4, 8, 16]
kept = measure_held(M, "never")
recomputed = {count: measure_held(count, "always") for count in counts}
draw_all_held(kept, recomputed, M)

# %% [markdown]
# The right picture shows the formula of GPipe's peak activation memory,
#
# $$O\left(N + \frac{L}{K} \times \frac{N}{M}\right).$$
#
# The first term is the boundary inputs of all $N$ examples, which do not depend on $M$. The second is the activations
# of the $L/K$ layers of a partition for one micro-batch of $N/M$ examples: it halves when $M$ doubles. A single device
# that keeps everything needs $O(N \times L)$.
#
# A large $M$ therefore helps twice: the bubble is smaller, and so is the memory. Re-materialisation costs one more
# forward pass, part of which hides in the bubble.
#
# ## Where to go next
#
# The [README](../README.md) shows the few lines that pipeline your own model. The schedule is
# `src/gpipe/pipeline/schedule.py`; the engine, the simulation and the pictures here all read it.
