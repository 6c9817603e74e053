"""Measure training steps of one process on several GPUs: one thread launches for all, or each GPU has its own.

    python -m experiments.device_threads

AmoebaNet-D on images so small that GPUs wait for their launches, a stage per GPU, on four GPUs at most. Two pipelines
of the same layers take turns of three steps. Needs two GPUs and two minutes.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

import gpipe
from experiments.program import StudyProgram, track
from gpipe.models import amoebanet_d
from gpipe.records import make_record
from reproductions.bubble.overheads import DEVICE_THREADS, device_threads, device_threads_run

NUM_LAYERS, NUM_FILTERS, IMAGE_SIZE, NUM_CLASSES, NUM_MICROBATCHES, BATCH_SIZE = 18, 64, 64, 1000, 16, 128
MOST_GPUS, STEPS = 4, 3  # steps of each turn
WAYS = "one thread", "a thread per device"


def make_pipeline(way: str, num_layers: int, num_filters: int, num_gpus: int) -> gpipe.Pipeline:
    """Return a pipeline with a stage per GPU."""
    with torch.device("meta"):
        layers = amoebanet_d(num_layers, num_filters, NUM_CLASSES)
    gpipe.convert_batch_norm(layers)
    images = torch.empty(BATCH_SIZE // NUM_MICROBATCHES, 3, IMAGE_SIZE, IMAGE_SIZE, device="meta")
    costs = [cost.flops for cost in gpipe.analyze_layers(layers, images)]
    partitions = gpipe.partition_layers(costs, num_gpus)
    devices = [f"cuda:{index}" for index in range(num_gpus)]
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, partitions, NUM_MICROBATCHES, devices=devices)
    pipeline.layers.to(memory_format=torch.channels_last)
    if way == WAYS[1]:
        pipeline.use_device_threads()
    return pipeline


def measure(num_layers: int, num_filters: int, num_gpus: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds per step of each way, round by round."""
    pipelines = {way: make_pipeline(way, num_layers, num_filters, num_gpus) for way in WAYS}
    images = torch.randn(BATCH_SIZE, 3, IMAGE_SIZE, IMAGE_SIZE).contiguous(memory_format=torch.channels_last)
    batch = images, torch.randint(NUM_CLASSES, (BATCH_SIZE,))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in track(range(rounds + 1), "rounds"):
        for way, pipeline in pipelines.items():
            found = [pipeline.train_step(batch).step_seconds for _ in range(STEPS)]
            if turn > 0:  # the first one chooses kernels
                seconds[way].append(median(found))
    return seconds


def main() -> None:
    """Read the command line, measure, and record."""
    program = StudyProgram(__doc__, {"bubble": [device_threads, device_threads_run]}, rounds=9)
    program.parser.add_argument("--layers", type=int, default=NUM_LAYERS, help="normal cells; default: %(default)s")
    program.parser.add_argument("--filters", type=int, default=NUM_FILTERS, help="default: %(default)s")
    options = program.parse()
    num_gpus = min(torch.cuda.device_count(), MOST_GPUS)
    if num_gpus < 2:
        program.parser.error(f"torch finds {num_gpus} GPUs here; the study needs two.")
    torch.backends.cudnn.benchmark = True  # as in training
    config: dict[str, Any] = {
        "model": {"num_layers": options.layers, "num_filters": options.filters},
        "image_size": IMAGE_SIZE,
        "batch_size": BATCH_SIZE,
        "num_microbatches": NUM_MICROBATCHES,
        "num_stages": num_gpus,
        "rounds": options.rounds,
    }
    record = make_record(
        kind="measured",
        experiment=DEVICE_THREADS,
        config=config,
        seed=0,
        results={"seconds": measure(options.layers, options.filters, num_gpus, options.rounds)},
        gpus=[torch.cuda.get_device_name(index) for index in range(num_gpus)],
    )
    program.publish({"bubble": [record]})


if __name__ == "__main__":
    main()
