"""The engines whose overhead is measured: ours, torch's, torchgpipe and a hand-written loop."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import gpipe
from experiments.engine_overhead.hand_written_loop import compute_loss, run_hand_written_step
from experiments.engine_overhead.sleeping_layers import BACKWARD, FORWARD, Sleeper, calibrate, read_median_seconds
from experiments.processes import start
from experiments.turns import time_steps

GRID = [(2, 8), (4, 16), (8, 32)]
STEPS = 3  # in a row, as in training: one stage may begin the next step before another ends this one


def measure_processes(
    mesh: DeviceMesh, num_microbatches: int, rounds: int
) -> tuple[dict[str, float], tuple[float, float]]:
    """Measure our engine, torch's and the hand-written loop, in one of the K processes.

    Returns:
        The seconds of a step by its name, and those of a layer's forward and backward, on average over the processes.
    """
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    calibrate()
    size = 16
    batch = torch.randn(num_microbatches, size), torch.randn(num_microbatches, size)
    steps: dict[str, Callable[[], object]] = {}
    for mode in ("never", "always"):
        layers = nn.Sequential(*(Sleeper() for _ in range(num_stages)))
        pipeline = gpipe.Pipeline(
            layers, compute_loss, [1] * num_stages, num_microbatches, rematerialize=mode, mesh=mesh
        )
        steps[f"ours, {mode}"] = lambda pipeline=pipeline: pipeline.train_step(batch)
    example = torch.randn(1, size, requires_grad=True)
    stage = PipelineStage(
        Sleeper(), rank, num_stages, torch.device("cpu"), input_args=(example,), output_args=(example.clone(),)
    )
    schedule = ScheduleGPipe(stage, num_microbatches, loss_fn=compute_loss)
    inputs, target = batch[:1] if rank == 0 else (), batch[1] if rank == num_stages - 1 else None
    steps["torch.distributed.pipelining, never"] = lambda: schedule.step(*inputs, target=target)
    layer = Sleeper()
    steps["hand-written loop, never"] = lambda: run_hand_written_step(layer, rank, num_stages, batch, size)
    what = f"turns with K = {num_stages}, M = {num_microbatches}" if rank == 0 else None
    found = time_steps(steps, rounds, what, STEPS, dist.barrier)
    layers_seconds: list[Any] = [None] * num_stages
    dist.all_gather_object(layers_seconds, read_median_seconds())  # noqa: TID251 - between processes of this program
    forward, backward = (statistics.mean(column) for column in zip(*layers_seconds, strict=True))
    return found, (forward, backward)


def measure_torchgpipe(num_stages: int, num_microbatches: int, rounds: int) -> dict[str, float]:
    """Measure torchgpipe, all of whose CPU partitions share one worker thread."""
    import torchgpipe

    layers = nn.Sequential(*(Sleeper() for _ in range(num_stages)))
    model = torchgpipe.GPipe(
        layers, [1] * num_stages, devices=["cpu"] * num_stages, chunks=num_microbatches, checkpoint="never"
    )
    inputs, targets = torch.randn(num_microbatches, 16), torch.randn(num_microbatches, 16)
    return time_steps({"torchgpipe, never": lambda: compute_loss(model(inputs), targets).backward()}, rounds)


def measure_grid(rounds: int) -> list[dict[str, Any]]:
    """Return one row per engine and setting."""
    rows = []
    for num_stages, num_microbatches in GRID:
        seconds, (forward, backward) = start(measure_processes, num_stages, num_microbatches, rounds)
        seconds |= measure_torchgpipe(num_stages, num_microbatches, max(rounds // 5, 1))
        for name, value in seconds.items():
            engine, mode = name.split(", ")
            slots = num_microbatches + num_stages - 1
            formula = slots * (FORWARD * (2 if mode == "always" else 1) + BACKWARD)
            row = {"engine": engine, "num_stages": num_stages, "num_microbatches": num_microbatches}
            row |= {"rematerialize": mode, "step_seconds": value, "formula_seconds": formula}
            rows.append(row | {"forward_seconds": forward, "backward_seconds": backward})
    return rows
