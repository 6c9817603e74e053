"""Measure schedules with split backwards on layers that sleep: ours beside torch.distributed.pipelining's.

    python -m experiments.zero_bubble

A device has two layers. Each takes 4 ms forward, 4 ms for the gradient of its input and 4 ms for that of its weight, so
a step has M x 24 ms of work per device. Layers sleep, so that P = 8 processes overlap on two cores. Sleeps are shorter
by what a layer's own operations take in all processes at once. The schedules take turns in the same processes, over
Gloo; results are medians. "Alone" is the least that any engine could take here, apart from the bubble: each process
runs its two layers forward and backward M times and sends nothing.

Each engine also trains a small network with dropout for one step, in one process and in P, and the gradients are
compared. Last, two real models train on two cores with our engine. Ten minutes on an idle machine.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import gpipe
from experiments.engine_overhead.engines import GRID, STEPS
from experiments.engine_overhead.hand_written_loop import compute_loss
from experiments.engine_overhead.sleeping_layers import FORWARD, SplitSleeper, calibrate, let_small_products_wait
from experiments.processes import start
from experiments.program import StudyProgram
from experiments.turns import time_steps
from gpipe.models import amoebanet_d, transformer_lm
from gpipe.pipeline.schedule import Kind, Rematerialize, Task
from gpipe.pipeline.schedules.choice import SCHEDULES
from gpipe.planning.simulation import simulate
from gpipe.planning.timing import LayerTimer
from gpipe.records import make_record
from reproductions.bubble.schedules import (
    ZERO_BUBBLE,
    zero_bubble,
    zero_bubble_exact,
    zero_bubble_models,
    zero_bubble_run,
)

SIZE, LAYERS_PER_DEVICE = 16, 2
TRANSFORMER, AMOEBANET, MODEL_MICROBATCHES = "Transformer-L, 8 layers of width 512", "AmoebaNet-D (6,32), 64 px", 4
ALONE = "no engine: the layers alone"
OURS = {"gpipe": 1, "1f1b": 1, "split_gpipe": 1, "zb_h1": 1, "interleaved_1f1b": 2, "zb_v": 2}  # stages per device
TORCHS: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved zero bubble": ScheduleInterleavedZeroBubble,
    "ZB-V": ScheduleZBVZeroBubble,
}


def build_ours(name: str, num_microbatches: int, layers: Sequence[nn.Module], mesh: DeviceMesh) -> gpipe.Pipeline:
    """Return our pipeline of equal stages, without re-materialisation, as torch's."""
    num_stages = dist.get_world_size() * OURS[name]
    return gpipe.Pipeline(
        nn.Sequential(*layers),
        compute_loss,
        [len(layers) // num_stages] * num_stages,
        num_microbatches,
        rematerialize="never",
        schedule=name,
        stages_per_device=OURS[name],
        mesh=mesh,
    )


def build_torchs(name: str, num_microbatches: int, layers: Sequence[nn.Module]) -> PipelineScheduleMulti:
    """Return torch's schedule of equal stages, two in each process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    num_stages = 2 * size
    share = len(layers) // num_stages
    example = torch.randn(1, SIZE, requires_grad=True)
    stages = [
        PipelineStage(
            nn.Sequential(*layers[index * share : (index + 1) * share]),
            index,
            num_stages,
            torch.device("cpu"),
            input_args=(example,),
            output_args=(example.clone(),),
        )
        for index in (rank, num_stages - 1 - rank if name == "ZB-V" else rank + size)
    ]
    return TORCHS[name](stages, num_microbatches, loss_fn=compute_loss)


def step_alone(layers: Sequence[nn.Module], micro_batches: Sequence[Tensor]) -> None:
    """Make the work of one device in a step, without an engine and without others."""
    for value, layer in itertools.product(micro_batches, layers):
        outputs = layer(value.clone().requires_grad_())
        torch.autograd.backward(outputs, torch.ones_like(outputs))


def step_torchs(schedule: PipelineScheduleMulti, name: str, batch: tuple[Tensor, Tensor]) -> None:
    """Make a step: the first process has the inputs, the last stage's process the targets."""
    rank, last = dist.get_rank(), 0 if name == "ZB-V" else dist.get_world_size() - 1
    schedule.step(*(batch[:1] if rank == 0 else ()), target=batch[1] if rank == last else None)


def measure(mesh: DeviceMesh, num_microbatches: int, rounds: int) -> dict[str, float]:
    """Measure all schedules in turns, in one of the P processes; return the seconds of each."""
    num_devices = dist.get_world_size()
    dist.barrier()
    calibrate(partial(step_alone, [SplitSleeper(SIZE)], [torch.randn(1, SIZE)]), 3 * FORWARD, sleeps=3)
    let_small_products_wait()
    batch = torch.randn(num_microbatches, SIZE), torch.randn(num_microbatches, SIZE)
    alone = [SplitSleeper(SIZE) for _ in range(LAYERS_PER_DEVICE)]
    steps: dict[str, Callable[[], object]] = {ALONE: partial(step_alone, alone, batch[0].split(1))}

    layers = [SplitSleeper(SIZE) for _ in range(num_devices * LAYERS_PER_DEVICE)]
    for name in OURS:
        pipeline = build_ours(name, num_microbatches, copy.deepcopy(layers), mesh)
        steps[f"ours: {name}"] = partial(pipeline.train_step, batch)
    for name in TORCHS:
        schedule = build_torchs(name, num_microbatches, copy.deepcopy(layers))
        steps[f"torch: {name}"] = partial(step_torchs, schedule, name, batch)
    what = f"turns with P = {num_devices}, M = {num_microbatches}" if dist.get_rank() == 0 else None
    return time_steps(steps, rounds, what, STEPS, dist.barrier)


def compute_gradients(mesh: DeviceMesh) -> dict[str, list[tuple[int, str, list[float]]]]:
    """Make one step of each engine in one of P processes; return the gradients of all layers."""
    let_small_products_wait()
    torch.manual_seed(0)
    batch = torch.randn(8, SIZE), torch.randn(8, SIZE)
    layers = [nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)]
    of_ours, of_torchs = copy.deepcopy(layers), copy.deepcopy(layers)
    pipeline = build_ours("zb_v", 8, of_ours, mesh)
    pipeline.train_step(batch)
    schedule = build_torchs("ZB-V", 8, of_torchs)
    torch.manual_seed(1)
    step_torchs(schedule, "ZB-V", batch)
    found = {"ours: zb_v": _list_gradients(of_ours), "torch: ZB-V": _list_gradients(of_torchs)}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)  # noqa: TID251 - between processes of this program
    pipeline.close()
    return {name: [row for part in parts for row in part[name]] for name in found}


def _list_gradients(layers: Sequence[nn.Module]) -> list[tuple[int, str, list[float]]]:
    """Return the gradients that this process has."""
    return [
        (index, name, parameter.grad.flatten().tolist())
        for index, layer in enumerate(layers)
        for name, parameter in layer.named_parameters()
        if parameter.grad is not None
    ]


def build_model(name: str) -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    """Return a model, the same in every process, and a mini-batch for it."""
    torch.manual_seed(0)
    if name == TRANSFORMER:
        layers = transformer_lm(8, vocabulary_size=64, model_size=512, feedforward_size=2048, num_heads=8)
        return layers, (torch.randint(64, (16, 64)), torch.randint(64, (16, 64)))
    layers = gpipe.convert_batch_norm(amoebanet_d(6, 32, 10))
    return layers, (torch.randn(32, 3, 64, 64), torch.randint(10, (32,)))


def compute_model_loss(outputs: Any, labels: Tensor) -> Tensor:
    """Return the cross-entropy of logits, at each position of a text or of an image."""
    logits = outputs if isinstance(outputs, Tensor) else outputs[0]
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def choose_partitions(name: str) -> dict[int, list[int]]:
    """Cut a model into two and into four stages, by the measured seconds of forward and backward."""
    layers, (inputs, labels) = build_model(name)
    size = len(inputs) // MODEL_MICROBATCHES
    timings = LayerTimer(torch.device("cpu"), 5).time(layers, compute_model_loss, (inputs[:size], labels[:size]))
    seconds = [timing.seconds.forward + timing.seconds.backward for timing in timings]
    seconds[-2] += seconds.pop()  # the last stage computes the loss
    return {num_stages: gpipe.partition_layers(seconds, num_stages) for num_stages in (2, 4)}


def measure_models(mesh: DeviceMesh, partitions: dict[str, dict[int, list[int]]], rounds: int) -> dict[str, float]:
    """Measure steps of real models in one of two processes, each on its own core; return the seconds of each."""
    steps: dict[str, Callable[[], object]] = {}
    for name, schedule in itertools.product(partitions, OURS):
        layers, batch = build_model(name)
        cut = partitions[name][dist.get_world_size() * OURS[schedule]]
        pipeline = gpipe.Pipeline(
            layers,
            compute_model_loss,
            cut,
            MODEL_MICROBATCHES,
            rematerialize="never",
            schedule=schedule,
            stages_per_device=OURS[schedule],
            mesh=mesh,
        )
        steps[f"{name}: {schedule}"] = partial(_train, pipeline, batch)
    what = "turns with real models" if dist.get_rank() == 0 else None
    return time_steps(steps, rounds, what, fence=dist.barrier)


def _train(pipeline: gpipe.Pipeline, batch: tuple[Tensor, Tensor]) -> None:
    pipeline.train_step(batch)
    for parameter in pipeline.parameters():
        parameter.grad = None


def measure_all_models(rounds: int) -> list[dict[str, Any]]:
    """Return one row per model and schedule."""
    torch.set_num_threads(1)
    partitions = {name: choose_partitions(name) for name in (TRANSFORMER, AMOEBANET)}
    seconds = start(measure_models, 2, partitions, 2 * rounds)
    rows = []
    for name, value in seconds.items():
        model, _, schedule = name.partition(": ")
        row = {"model": model, "schedule": schedule, "step_seconds": value}
        rows.append(row | {"partitions": partitions[model][2 * OURS[schedule]]})
    return rows


def simulate_step(name: str, num_devices: int, num_microbatches: int) -> float:
    """Return the seconds of a step of ours in which only the layers take time."""
    per_device = OURS[name]

    def get_seconds(task: Task) -> float:
        return FORWARD * LAYERS_PER_DEVICE / per_device * (2 if task.kind is Kind.BACKWARD else 1)

    tasks = SCHEDULES[name](num_devices * per_device, num_microbatches, Rematerialize.NEVER, per_device)
    return simulate(tasks, get_seconds).makespan_seconds


def measure_grid(rounds: int) -> list[dict[str, Any]]:
    """Return one row per schedule and setting."""
    rows = []
    for num_devices, num_microbatches in GRID:
        seconds = start(measure, num_devices, num_microbatches, rounds)
        for name, value in seconds.items():
            engine, _, schedule = name.partition(": ")
            row = {"engine": engine, "schedule": schedule, "num_devices": num_devices, "step_seconds": value}
            row |= {"num_microbatches": num_microbatches, "simulated_seconds": None}
            row["work_seconds"] = 3 * FORWARD * LAYERS_PER_DEVICE * num_microbatches
            if engine == "ours":
                row["simulated_seconds"] = simulate_step(schedule, num_devices, num_microbatches)
            rows.append(row)
    return rows


def compare_gradients() -> list[dict[str, Any]]:
    """Return by how much each engine's gradients in two processes differ from those in one."""
    one, two = (start(compute_gradients, num_devices) for num_devices in (1, 2))
    rows = []
    for name in one:
        first, second = (torch.cat([torch.tensor(row[2]) for row in sorted(each[name])]) for each in (one, two))
        engine, _, schedule = name.partition(": ")
        difference = float((first - second).abs().max() / first.abs().max())
        rows.append({"engine": engine, "schedule": schedule, "largest_difference": difference})
    return rows


if __name__ == "__main__":
    tables = {"bubble": [zero_bubble, zero_bubble_exact, zero_bubble_models, zero_bubble_run]}
    program = StudyProgram(__doc__, tables, rounds=11, what_rounds_are=f"turns of each schedule, of {STEPS} steps")
    options = program.parse()
    found = {"grid": measure_grid(options.rounds), "exactness": compare_gradients()}
    found["models"] = measure_all_models(options.rounds)
    settings = {"layer_seconds": FORWARD, "layers_per_device": LAYERS_PER_DEVICE, "rounds": options.rounds}
    record = make_record(kind="measured", experiment=ZERO_BUBBLE, config=settings, seed=0, results=found)
    program.publish({"bubble": [record]})
