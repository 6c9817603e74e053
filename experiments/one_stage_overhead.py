"""Measure the engine's cost without pipelining: K = 1 beside a hand-written loop over micro-batches.

    python -m experiments.one_stage_overhead

A small AmoebaNet-D on one core, with all activations kept and with re-materialisation. For the latter the loop uses
torch.utils.checkpoint in both variants: non-reentrant, whose first forward runs the same kernels as its recomputation,
as ours does, and reentrant. All take turns; results are medians of the paired ratios. Three minutes.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gpipe
from experiments.program import StudyProgram
from experiments.turns import clock, median_ratio, take_turns
from gpipe.models import amoebanet_d
from reproductions.bubble.overheads import ONE_STAGE_OVERHEAD

NUM_LAYERS, NUM_FILTERS, NUM_MICROBATCHES, BATCH_SIZE, IMAGE_SIZE = 6, 32, 4, 32, 64


def measure(rounds: int) -> dict[str, float]:
    """Return the median seconds of each, and the median of the rounds' ratios to the hand-written loop."""
    loss = nn.functional.cross_entropy
    images = torch.randn(BATCH_SIZE, 1, IMAGE_SIZE, IMAGE_SIZE)
    labels = torch.randint(10, (BATCH_SIZE,))

    def build() -> nn.Sequential:
        return amoebanet_d(NUM_LAYERS, NUM_FILTERS, 10, image_channels=1)

    def loop(run: Callable[[nn.Sequential, Tensor], Tensor]) -> Callable[[], None]:
        plain, size = build(), BATCH_SIZE // NUM_MICROBATCHES

        def step() -> None:
            for inputs, targets in zip(images.split(size), labels.split(size), strict=True):
                (loss(run(plain, inputs), targets) * (len(inputs) / BATCH_SIZE)).backward()

        return step

    def ours(mode: str) -> Callable[[], object]:
        layers = gpipe.convert_batch_norm(build())
        pipeline = gpipe.Pipeline(layers, loss, [len(layers)], NUM_MICROBATCHES, rematerialize=mode)
        return lambda: pipeline.train_step((images, labels))

    steps = {
        "hand_written": loop(lambda model, inputs: model(inputs)),
        "ours": ours("never"),
        "checkpoint": loop(lambda model, inputs: checkpoint(model, inputs, use_reentrant=False)),
        "checkpoint_reentrant": loop(
            # Inputs without a gradient would leave it without a graph.
            lambda model, inputs: checkpoint(model, inputs.requires_grad_(), use_reentrant=True)
        ),
        "ours_rematerialized": ours("always"),
    }
    seconds = take_turns({name: partial(clock, step) for name, step in steps.items()}, rounds)
    medians = {f"{name}_seconds": statistics.median(values) for name, values in seconds.items()}
    ratios = {name: median_ratio(values, seconds["hand_written"]) for name, values in seconds.items()}
    del ratios["hand_written"]
    return medians | {"ratio": ratios.pop("ours")} | {f"{name}_ratio": ratio for name, ratio in ratios.items()}


if __name__ == "__main__":
    tables = {"bubble": ONE_STAGE_OVERHEAD.tables}
    program = StudyProgram(__doc__, tables, rounds=41, what_rounds_are="steps of each")
    options = program.parse()
    torch.set_num_threads(1)
    results = measure(options.rounds)
    settings = {
        "rounds": options.rounds,
        "num_layers": NUM_LAYERS,
        "num_filters": NUM_FILTERS,
        "batch_size": BATCH_SIZE,
        "num_microbatches": NUM_MICROBATCHES,
        "image_size": IMAGE_SIZE,
    }
    program.publish_record(ONE_STAGE_OVERHEAD.make_record(settings, results))
