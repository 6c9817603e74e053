"""Measure training steps of one process on several GPUs: one thread launches for all, or each GPU has its own.

    python -m experiments.device_threads

AmoebaNet-D on images so small that GPUs wait for launches, one stage per GPU, on at most four GPUs. Two pipelines of
the same layers take turns, three steps each. Needs two GPUs and two minutes.
"""

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch.nn import functional as F

import gpipe
from experiments.program import StudyProgram
from experiments.turns import take_turns
from gpipe.models import amoebanet_d
from reproductions.bubble.overheads import DEVICE_THREADS

NUM_CLASSES, IMAGES_PER_MICROBATCH, MOST_GPUS = 1000, 8, 4
STEPS = 3  # of each turn
WAYS = "one thread", "a thread per device"


class Setting(NamedTuple):
    """What is trained."""

    num_layers: int
    num_filters: int
    image_size: int
    num_microbatches: int


FULL, SMALL = Setting(18, 64, 64, 16), Setting(3, 8, 32, 2)  # the small one for tests


def make_pipeline(way: str, setting: Setting, num_gpus: int) -> gpipe.Pipeline:
    """Return a pipeline with a stage per GPU."""
    with torch.device("meta"):
        layers = amoebanet_d(setting.num_layers, setting.num_filters, NUM_CLASSES)
    gpipe.convert_batch_norm(layers)
    images = torch.empty(IMAGES_PER_MICROBATCH, 3, setting.image_size, setting.image_size, device="meta")
    costs = [cost.flops for cost in gpipe.analyze_layers(layers, images)]
    partitions = gpipe.partition_layers(costs, num_gpus)
    devices = [f"cuda:{index}" for index in range(num_gpus)]
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, partitions, setting.num_microbatches, devices=devices)
    pipeline.layers.to(memory_format=torch.channels_last)
    if way == WAYS[1]:
        pipeline.use_device_threads()
    return pipeline


def measure(setting: Setting, num_gpus: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds per step of each way, round by round."""
    batch_size, size = IMAGES_PER_MICROBATCH * setting.num_microbatches, setting.image_size
    images = torch.randn(batch_size, 3, size, size).contiguous(memory_format=torch.channels_last)
    batch = images, torch.randint(NUM_CLASSES, (batch_size,))

    def make(way: str) -> Callable[[], float]:
        pipeline = make_pipeline(way, setting, num_gpus)
        return lambda: median(pipeline.train_step(batch).step_seconds for _ in range(STEPS))

    return take_turns({way: make(way) for way in WAYS}, rounds)


if __name__ == "__main__":
    program = StudyProgram(__doc__, {"bubble": DEVICE_THREADS.tables}, rounds=9)
    program.parser.add_argument("--small", action="store_true", help="sizes that a test can afford")
    options = program.parse()
    num_gpus = min(torch.cuda.device_count(), MOST_GPUS)
    if num_gpus < 2:
        program.parser.error(f"torch finds {num_gpus} GPUs here; the study needs two.")
    torch.backends.cudnn.benchmark = True  # as in training
    setting = SMALL if options.small else FULL
    config = setting._asdict() | {
        "images_per_microbatch": IMAGES_PER_MICROBATCH,
        "num_stages": num_gpus,
        "rounds": options.rounds,
    }
    gpus = [torch.cuda.get_device_name(index) for index in range(num_gpus)]
    results = {"seconds": measure(setting, num_gpus, options.rounds)}
    program.publish_record(DEVICE_THREADS.make_record(config, results, gpus=gpus))
