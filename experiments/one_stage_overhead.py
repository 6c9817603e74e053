"""Measure the engine's cost without pipelining: K = 1 beside a hand-written loop over micro-batches.

    python -m experiments.one_stage_overhead

A small AmoebaNet-D on one core. The two take turns; the result is the median of the paired ratios. Half a minute.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

import gpipe
from experiments.program import StudyProgram, track
from gpipe.models import amoebanet_d
from gpipe.records import make_record
from reproductions.bubble.tables import one_stage_overhead

NUM_LAYERS, NUM_FILTERS, NUM_MICROBATCHES, BATCH_SIZE, IMAGE_SIZE = 6, 32, 4, 32, 64


def measure(rounds: int) -> dict[str, float]:
    """Return the median seconds of both, and the median of the rounds' ratios."""
    plain, layers = (amoebanet_d(NUM_LAYERS, NUM_FILTERS, 10, image_channels=1) for _ in range(2))
    loss = nn.functional.cross_entropy
    pipeline = gpipe.Pipeline(
        gpipe.convert_batch_norm(layers), loss, [len(layers)], NUM_MICROBATCHES, rematerialize="never"
    )
    images = torch.randn(BATCH_SIZE, 1, IMAGE_SIZE, IMAGE_SIZE)
    labels = torch.randint(10, (BATCH_SIZE,))

    def run_loop() -> None:
        size = BATCH_SIZE // NUM_MICROBATCHES
        for inputs, targets in zip(images.split(size), labels.split(size), strict=True):
            (loss(plain(inputs), targets) * (len(inputs) / BATCH_SIZE)).backward()

    steps = {"hand_written": run_loop, "ours": lambda: pipeline.train_step((images, labels))}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in track(range(rounds + 1), "rounds"):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    # The first round warms up.
    ratio = statistics.median(b / a for a, b in list(zip(*seconds.values(), strict=True))[1:])
    medians = {f"{name}_seconds": statistics.median(values[1:]) for name, values in seconds.items()}
    return medians | {"ratio": ratio}


if __name__ == "__main__":
    program = StudyProgram(__doc__, {"bubble": [one_stage_overhead]}, rounds=41, what_rounds_are="steps of each")
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
    record = make_record(kind="measured", experiment="one_stage_overhead", config=settings, seed=0, results=results)
    program.publish({"bubble": [record]})
