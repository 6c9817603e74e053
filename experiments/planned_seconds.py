"""Measure how well calibrated plans foretell a step: planned beside measured seconds of small models on this machine.

    python -m experiments.planned_seconds

Two models, K = 1 and 2, and four schedules. The layers are timed in as many processes at once as the step has, each on
a core of its own, and a plan cuts them. Then the same processes train, time the layers again, and the step that is
simulated with the mean of both timings is compared with the median of the steps. Neither has an update. Seven minutes
on two idle cores.
"""

from __future__ import annotations

import os
import time
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gpipe
from experiments.program import StudyProgram, track
from experiments.zero_bubble import AMOEBANET, TRANSFORMER, build_model, compute_model_loss, start
from gpipe.pipeline.schedule import Rematerialize
from gpipe.planning.accelerator import LayerSeconds, Speed, find_accelerator
from gpipe.planning.cut import Cutter
from gpipe.planning.profile import profile_layers
from gpipe.planning.step import Setting, plan_step
from gpipe.planning.timing import LayerTimer
from gpipe.records import make_record
from reproductions.bubble.tables import PLANNED_SECONDS, planned_seconds, planned_seconds_run

NUM_MICROBATCHES, TIMED_RUNS, WARM_UP, PORT = 4, 15, 2, 29820


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


def measure(rank: int, num_processes: int, case: Case, rounds: int, port: int, results: Any) -> None:
    """Time the layers, plan, and train, in one of K processes."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_processes)
    layers, batch = build_model(case.model)
    size = len(batch[0]) // NUM_MICROBATCHES
    example = batch[0][:size], batch[1][:size]
    before = _time_layers(layers, example)
    speed = Speed.of(find_accelerator("cpu"), "float32")
    setting = Setting(
        case.num_stages, NUM_MICROBATCHES, Rematerialize(case.mode), case.schedule, is_sequential=num_processes == 1
    )
    profiles = profile_layers(layers, compute_model_loss, example)
    partitions = Cutter("seconds", "step", speed, lambda _: before)(profiles, setting)
    mesh = None
    if num_processes > 1:
        mesh = init_device_mesh("cpu", (1, num_processes), mesh_dim_names=("replica", "stage"))
    pipeline = gpipe.Pipeline(
        layers,
        compute_model_loss,
        partitions,
        NUM_MICROBATCHES,
        rematerialize=case.mode,
        schedule=case.schedule,
        mesh=mesh,
    )
    found = []
    for turn in range(WARM_UP + rounds):
        dist.barrier()
        begin = time.perf_counter()
        pipeline.train_step(batch)
        if turn >= WARM_UP:
            found.append(time.perf_counter() - begin)
        for parameter in pipeline.parameters():
            parameter.grad = None
    # A machine's speed drifts within a minute by more than the plan is off: the layers are timed on both sides.
    seconds = _mean([before, _time_layers(build_model(case.model)[0], example)])
    if rank == 0:
        planned = plan_step(profiles, seconds, partitions, setting, speed).timeline.makespan_seconds
        results.put({**case._asdict(), "partitions": partitions, "planned": planned, "measured": median(found)})
    dist.barrier()
    pipeline.close()
    dist.destroy_process_group()


def _time_layers(layers: nn.Sequential, example: tuple[Any, Any]) -> list[LayerSeconds]:
    """Time the layers in all processes at once, and return what they take on average."""
    dist.barrier()
    timings = LayerTimer(torch.device("cpu"), TIMED_RUNS, splits=True).time(layers, compute_model_loss, example)
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, [timing.seconds for timing in timings])  # noqa: TID251 - of this program
    return _mean(rows)


def _mean(rows: list[list[LayerSeconds]]) -> list[LayerSeconds]:
    return [LayerSeconds(*map(fmean, zip(*layer, strict=True))) for layer in zip(*rows, strict=True)]


if __name__ == "__main__":
    program = StudyProgram(
        __doc__,
        {"bubble": [planned_seconds, planned_seconds_run]},
        rounds=15,
        what_rounds_are="steps per case",
    )
    options = program.parse()
    numbered = list(enumerate(CASES))
    cases = [
        start(measure, case.num_stages, case, options.rounds, PORT + number)
        for number, case in track(numbered, "cases")
    ]
    settings = {"num_microbatches": NUM_MICROBATCHES, "timed_runs": TIMED_RUNS, "rounds": options.rounds}
    record = make_record(kind="measured", experiment=PLANNED_SECONDS, config=settings, seed=0, results={"cases": cases})
    program.publish({"bubble": [record]})
