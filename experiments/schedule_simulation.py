"""Compare the simulator with the engine's steps, schedule by schedule.

    python -m experiments.schedule_simulation

Stages of unequal layers sleep for a set time, in one process per device over Gloo. The inputs of the simulator are
these times, the schedule's tasks, the time that plans for a CPU assume for a message, and the time that the engine adds
to a task of a sleeping layer, measured before in one process, as by a calibration. It uses nothing from the steps that
it is compared with. The tables also show the time that the engine really added to their tasks. Any further time of a
step is the machine's. Four minutes.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import gpipe
from experiments.engine_overhead.hand_written_loop import compute_loss
from experiments.engine_overhead.sleeping_layers import SplitSleeper, calibrate, let_small_products_wait
from experiments.processes import start
from experiments.program import StudyProgram
from experiments.schedule_memory import SCHEDULES
from experiments.turns import take_turns
from gpipe.pipeline.schedule import Rematerialize, Task
from gpipe.pipeline.schedules import choice
from gpipe.planning.accelerator import LayerSeconds, Speed, find_accelerator
from gpipe.planning.simulation import simulate
from gpipe.planning.task_timing import measure_task_seconds
from reproductions.bubble.schedules import SCHEDULE_SIMULATION

NUM_DEVICES, NUM_MICROBATCHES, SIZE = 4, 8, 16
MODES = ("never", "always")
FORWARD, BACKWARD = 0.032, 0.064  # mean seconds of a device per micro-batch
UNEVEN = (1.0, 1.2, 0.8, 1.0)  # factors of the stages, repeated


def make_layer(stage: int, stages_per_device: int) -> SplitSleeper:
    """Return the only layer of a stage; a device has the same work with any number of stages."""
    share = UNEVEN[stage % len(UNEVEN)] / stages_per_device
    return SplitSleeper(SIZE, FORWARD * share, BACKWARD / 2 * share, BACKWARD / 2 * share)


def simulate_step(name: str, stages_per_device: int, mode: str, task_seconds: float) -> float:
    """Return the seconds of a step in which only layers, messages and what the engine adds to tasks take time."""
    num_stages = NUM_DEVICES * stages_per_device
    layers = [make_layer(stage, stages_per_device) for stage in range(num_stages)]
    speed = replace(Speed.of(find_accelerator("cpu"), "float32"), task_seconds=task_seconds)

    def get_seconds(task: Task) -> float:
        return layers[task.stage].seconds.of(task.kind) + speed.task_seconds

    schedule = choice.SCHEDULES[name](num_stages, NUM_MICROBATCHES, Rematerialize(mode), stages_per_device)
    message = speed.transfer_seconds(4 * SIZE)
    return simulate(schedule, get_seconds, lambda _: message).makespan_seconds


def measure(mesh: DeviceMesh, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Measure all schedules in turns, in one of the P processes; return the medians of what `_step` returns."""
    calibrate()
    let_small_products_wait()
    batch = torch.randn(NUM_MICROBATCHES, SIZE), torch.randn(NUM_MICROBATCHES, SIZE)
    ways = {}
    for (name, stages_per_device), mode in product(SCHEDULES, MODES):
        num_stages = NUM_DEVICES * stages_per_device
        layers = [make_layer(stage, stages_per_device) for stage in range(num_stages)]
        pipeline = gpipe.Pipeline(
            nn.Sequential(*layers),
            compute_loss,
            [1] * num_stages,
            NUM_MICROBATCHES,
            rematerialize=mode,
            schedule=name,
            stages_per_device=stages_per_device,
            mesh=mesh,
        )
        ways[name, mode] = partial(_step, pipeline, batch, [layer.seconds for layer in layers])
    found = take_turns(ways, rounds, "rounds" if dist.get_rank() == 0 else None)
    return {key: [median(column) for column in zip(*each, strict=True)] for key, each in found.items()}


def _step(
    pipeline: gpipe.Pipeline, batch: tuple[Tensor, Tensor], slept: Sequence[LayerSeconds]
) -> tuple[float, float, float]:
    """Make a step; return its seconds, those of its tasks, and by how much a task exceeds its sleep, on average."""
    dist.barrier()
    begin = time.perf_counter()
    timeline = pipeline.train_step(batch, record_timeline=True).timeline
    dist.barrier()
    seconds = time.perf_counter() - begin
    added = fmean(end - start - slept[task.stage].of(task.kind) for task, start, end in timeline.events)
    return seconds, timeline.makespan_seconds, added


def measure_all(rounds: int, task_seconds: float) -> list[dict[str, Any]]:
    """Return one row per schedule and mode."""
    found = start(measure, NUM_DEVICES, rounds)
    rows = []
    for (name, stages_per_device), mode in product(SCHEDULES, MODES):
        step, makespan, added = found[name, mode]
        simulated = simulate_step(name, stages_per_device, mode, task_seconds)
        row = {"schedule": name, "num_devices": NUM_DEVICES, "stages_per_device": stages_per_device}
        row |= {"num_microbatches": NUM_MICROBATCHES, "rematerialize": mode, "step_seconds": step}
        rows.append(row | {"makespan_seconds": makespan, "simulated_seconds": simulated, "added_seconds": added})
    return rows


if __name__ == "__main__":
    tables = {"bubble": SCHEDULE_SIMULATION.tables}
    program = StudyProgram(__doc__, tables, rounds=7, what_rounds_are="steps of each schedule")
    options = program.parse()
    settings = {"forward_seconds": FORWARD, "backward_seconds": BACKWARD, "uneven": UNEVEN, "rounds": options.rounds}
    torch.set_num_threads(1)
    task_seconds = measure_task_seconds(partial(time.sleep, FORWARD))
    results = {"task_seconds": task_seconds, "grid": measure_all(options.rounds, task_seconds)}
    program.publish_record(SCHEDULE_SIMULATION.make_record(settings, results))
