"""Measure the speed of layers made by `gpipe.as_layers`: K = 1 beside the plain model, and K = 2 beside K = 1.

    python -m experiments.traced_speed

The models are timm's ResNet-50 and ViT-S, on small images. At K = 1, a step takes turns with a hand-written loop that
runs the model itself over the same number of micro-batches, in one process on one core. At K = 2, a step of two
processes, each on its own core, takes turns with a step of only the first one. The loop runs a micro-batch's backward
pass before the next one's forward pass, as 1F1B does with one stage; GPipe keeps the activations of all micro-batches.
Each comparison runs in several jobs; results are the medians of all paired ratios. A quarter of an hour on two idle
cores.
"""

import copy
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import gpipe._compat.torchvision  # before timm

# isort: split

import timm
import torch
from torch import Tensor, nn

import gpipe
from experiments.peers.engines import Place
from experiments.peers.processes import fence, run
from experiments.program import StudyProgram, track
from experiments.turns import clock, median_ratio, take_turns
from gpipe.planning.timing import LayerTimer
from reproductions.task_independence.tables import TRACED_SPEED

CLAIM = "task_independence"
NUM_CLASSES, BATCH_SIZE, IMAGE_SIZE, NUM_MICROBATCHES = 10, 32, 96, 8
MODELS: dict[str, dict[str, Any]] = {"resnet50": {}, "vit_small_patch16_224": {"img_size": IMAGE_SIZE}}
SCHEDULES = ("1f1b", "gpipe")
NUM_JOBS = 3  # where memory lies decides over some per cent, and it differs from process to process
LOSS = nn.functional.cross_entropy


class Cell(NamedTuple):
    """A model, its cut, and the order of the micro-batches."""

    model: str
    partitions: tuple[int, ...]
    schedule: str

    @property
    def num_stages(self) -> int:
        """K."""
        return len(self.partitions)


def build(name: str) -> nn.Module:
    """Build a model in training mode, the same in all processes."""
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, num_classes=NUM_CLASSES, **MODELS[name]).train()
    return model


def make_layers(model: nn.Module) -> nn.Sequential:
    """Return a model as layers that a pipeline takes."""
    return gpipe.convert_batch_norm(gpipe.as_layers(model, torch.empty(2, 3, IMAGE_SIZE, IMAGE_SIZE)))


def make_batch() -> tuple[Tensor, Tensor]:
    """Return noise and labels."""
    return torch.randn(BATCH_SIZE, 3, IMAGE_SIZE, IMAGE_SIZE), torch.randint(NUM_CLASSES, (BATCH_SIZE,))


def make_pipeline(model: nn.Module, cell: Cell, place: Place) -> gpipe.Pipeline:
    """Return a model's pipeline; of one stage, or with a process per stage."""
    mesh = place.mesh if cell.num_stages > 1 else None
    return gpipe.Pipeline(
        make_layers(model),
        LOSS,
        cell.partitions,
        NUM_MICROBATCHES,
        schedule=cell.schedule,
        rematerialize="never",
        mesh=mesh,
    )


def choose_partitions(name: str, num_stages: int) -> tuple[int, ...]:
    """Cut a model by the seconds that forward and backward of its layers take."""
    torch.set_num_threads(1)
    layers, (images, labels) = make_layers(build(name)), make_batch()
    size = BATCH_SIZE // NUM_MICROBATCHES
    timings = LayerTimer(torch.device("cpu"), 5).time(layers, LOSS, (images[:size], labels[:size]))
    seconds = [timing.seconds.forward + timing.seconds.backward for timing in timings]
    seconds[-2] += seconds.pop()  # the last stage computes the loss
    return tuple(gpipe.partition_layers(seconds, num_stages))


def compare_with_loop(cell: Cell, place: Place, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round, of the plain model and of its layers in a pipeline of one stage."""
    plain = build(cell.model)
    pipeline, (images, labels) = make_pipeline(copy.deepcopy(plain), cell, place), make_batch()

    def run_loop() -> None:
        size = BATCH_SIZE // NUM_MICROBATCHES
        for inputs, targets in zip(images.split(size), labels.split(size), strict=True):
            (LOSS(plain(inputs), targets) * (len(inputs) / BATCH_SIZE)).backward()

    return time_in_turns({"plain": run_loop, "ours": lambda: pipeline.train_step((images, labels))}, place, rounds)


def compare_with_one_stage(cell: Cell, place: Place, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round, with one stage and with several."""
    batch = make_batch()
    whole = cell._replace(partitions=(sum(cell.partitions),))
    stages = make_pipeline(build(cell.model), cell, place)
    steps = {"one_stage": lambda: None, "stages": lambda: stages.train_step(batch)}
    if place.rank == 0:
        alone = make_pipeline(build(cell.model), whole, place)
        steps["one_stage"] = lambda: alone.train_step(batch)
    return time_in_turns(steps, place, rounds)


def time_in_turns(steps: Mapping[str, Callable[[], Any]], place: Place, rounds: int) -> dict[str, list[float]]:
    """Run steps in turns, and return the seconds of each."""
    wait = partial(fence, place)
    return take_turns({name: partial(clock, step, fence=wait) for name, step in steps.items()}, rounds, what=None)


def pool(function: Callable[..., Any], cell: Cell, num_processes: int, rounds: int) -> dict[str, list[float]]:
    """Measure in several new jobs, and return the seconds of all rounds."""
    jobs = [run(function, cell, num_processes, rounds) for _ in range(NUM_JOBS)]
    return {name: [second for job in jobs for second in job[name]] for name in jobs[0]}


def measure(name: str, partitions: tuple[int, ...], schedule: str, rounds: int) -> dict[str, Any]:
    """Return what is known of one model with one schedule."""
    loop = pool(compare_with_loop, Cell(name, (sum(partitions),), schedule), 1, rounds)
    stages = pool(compare_with_one_stage, Cell(name, partitions, schedule), 2, rounds)
    return {
        "model": name,
        "schedule": schedule,
        "partitions": list(partitions),
        "seconds": {key: statistics.median(found) for key, found in (loop | stages).items()},
        "cost": median_ratio(loop["ours"], loop["plain"]),
        "speedup": median_ratio(stages["one_stage"], stages["stages"]),
    }


if __name__ == "__main__":
    program = StudyProgram(
        __doc__,
        {CLAIM: TRACED_SPEED.tables},
        rounds=11,
        what_rounds_are=f"steps of each in each of {NUM_JOBS} jobs",
    )
    options = program.parse()
    cuts = {name: choose_partitions(name, 2) for name in MODELS}
    cells = [(name, cuts[name], schedule) for name in MODELS for schedule in SCHEDULES]
    rows = [measure(*cell, options.rounds) for cell in track(cells, "models and schedules")]
    config = {
        "rounds": options.rounds,
        "batch_size": BATCH_SIZE,
        "image_size": IMAGE_SIZE,
        "num_microbatches": NUM_MICROBATCHES,
        "num_jobs": NUM_JOBS,
    }
    program.publish_record(TRACED_SPEED.make_record(config, {"models": rows}))
