"""Measure how well calibrated plans predict a step: planned beside measured seconds of small models on this machine.

    python -m experiments.planned_seconds

Two models, K = 1 and 2, and four schedules. The layers, and what the engine adds to a task, are timed in as many
processes at once as the step has, each on its own core, and a plan cuts the model. Then the same processes time the
layers again and train, in turns. The table shows the medians of the planned and of the measured steps, both without the
update. Eight minutes on two idle cores.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import gpipe
from experiments.peers.engines import Place
from experiments.peers.processes import run
from experiments.program import StudyProgram, track
from experiments.zero_bubble import AMOEBANET, TRANSFORMER, build_model, compute_model_loss
from gpipe.pipeline.schedule import Rematerialize
from gpipe.planning.accelerator import LayerSeconds, Speed, find_accelerator
from gpipe.planning.cut import Cutter
from gpipe.planning.profile import profile_layers
from gpipe.planning.step import Setting, plan_step
from gpipe.planning.task_timing import measure_task_seconds
from gpipe.planning.timing import LayerTimer, LayerTiming
from reproductions.bubble.plans import PLANNED_SECONDS

NUM_MICROBATCHES, TIMED_RUNS, NUM_STEPS = 4, 5, 3


class Case(NamedTuple):
    """What is planned and trained."""

    model: str
    num_stages: int
    schedule: str
    mode: str


CASES = [
    Case(model, *shape)
    for model in (TRANSFORMER, AMOEBANET)
    for shape in (
        (1, "gpipe", "always"),
        (1, "gpipe", "never"),
        (2, "gpipe", "always"),
        (2, "1f1b", "never"),
        (2, "zb_h1", "never"),
    )
]


def measure(case: Case, place: Place, rounds: int) -> dict[str, Any]:
    """Time the layers, plan, and train, in one of K processes, each on its own core."""
    layers, batch = build_model(case.model)
    size = len(batch[0]) // NUM_MICROBATCHES
    example = batch[0][:size], batch[1][:size]
    first = [timing.seconds for timing in _time_layers(layers, example)]
    dist.barrier()
    (task_seconds,) = _average([measure_task_seconds()])
    speed = replace(Speed.of(find_accelerator("cpu"), "float32"), task_seconds=task_seconds)
    setting = Setting(
        case.num_stages, NUM_MICROBATCHES, Rematerialize(case.mode), case.schedule, is_sequential=case.num_stages == 1
    )
    profiles = profile_layers(layers, compute_model_loss, example)
    partitions = Cutter("seconds", "step", speed, lambda _: first)(profiles, setting)
    pipeline = gpipe.Pipeline(
        layers,
        compute_model_loss,
        partitions,
        NUM_MICROBATCHES,
        rematerialize=case.mode,
        schedule=case.schedule,
        mesh=place.mesh,
    )
    planned, measured = [], []
    # A machine's speed drifts within a minute by more than a plan is off: timings and steps take turns.
    for _ in range(rounds):
        timings = _time_layers(layers, example)
        seconds, updates = [timing.seconds for timing in timings], [timing.update for timing in timings]
        plan = plan_step(profiles, seconds, partitions, setting, speed, layer_update_seconds=updates)
        planned.append(plan.step_seconds)
        found = []
        for _ in range(1 + NUM_STEPS):
            dist.barrier()
            begin = time.perf_counter()
            pipeline.train_step(batch)
            found.append(time.perf_counter() - begin)
            for parameter in pipeline.parameters():
                parameter.grad = None
        measured.append(median(found[1:]))
    dist.barrier()
    pipeline.close()
    row = {"partitions": partitions, "task_seconds": task_seconds}
    return {**case._asdict(), **row, "planned": median(planned), "measured": median(measured)}


def _time_layers(layers: nn.Sequential, example: tuple[Any, Any]) -> list[LayerTiming]:
    """Time the layers in all processes at once, and return what they take on average."""
    dist.barrier()
    timings = LayerTimer(torch.device("cpu"), TIMED_RUNS, splits=True).time(layers, compute_model_loss, example)
    averages = [_average([*timing.seconds, timing.update]) for timing in timings]
    return [LayerTiming(LayerSeconds(*seconds), update) for *seconds, update in averages]


def _average(seconds: Sequence[float]) -> list[float]:
    """Return what the processes found on average."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, list(seconds))  # noqa: TID251 - of this program
    return [fmean(column) for column in zip(*rows, strict=True)]


if __name__ == "__main__":
    program = StudyProgram(
        __doc__,
        {"bubble": PLANNED_SECONDS.tables},
        rounds=5,
        what_rounds_are="turns per case, of a timing and three steps",
    )
    options = program.parse()
    cases = [run(measure, case, case.num_stages, options.rounds) for case in track(CASES, "cases")]
    settings = {
        "num_microbatches": NUM_MICROBATCHES,
        "timed_runs": TIMED_RUNS,
        "num_steps": NUM_STEPS,
        "rounds": options.rounds,
    }
    program.publish_record(PLANNED_SECONDS.make_record(settings, {"cases": cases}))
