"""The engines whose overhead is measured: ours, torch's, torchgpipe and a hand-written loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import gpipe
from experiments.engine_overhead.hand_written_loop import compute_loss, run_hand_written_step
from experiments.engine_overhead.sleeping_layers import BACKWARD, FORWARD, Sleeper, calibrate, read_median_seconds
from experiments.program import track

GRID = [(2, 8), (4, 16), (8, 32)]
STEPS = 3  # in a row, as in training: one stage may begin the next step before another ends this one


def measure_median_seconds(
    steps: dict[str, Callable[[], object]],
    rounds: int,
    fence: Callable[[], object] = int,
    in_a_row: int = 1,
    what: str | None = None,
) -> dict[str, float]:
    """Run the steps in turns; return the median seconds of each. `what` names the turns in a line of progress."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    turns = range(rounds + 1)
    for turn in turns if what is None else track(turns, what):
        for name, step in steps.items():
            fence()
            start = time.perf_counter()
            for _ in range(in_a_row):
                step()
            fence()
            if turn > 0:  # the first one warms up
                seconds[name].append((time.perf_counter() - start) / in_a_row)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure_processes(rank: int, num_stages: int, num_microbatches: int, rounds: int, port: int, results: Any) -> None:
    """Measure our engine, torch's and the hand-written loop, in one of the K processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_stages)
    mesh = init_device_mesh("cpu", (1, num_stages), mesh_dim_names=("replica", "stage"))
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
    found = measure_median_seconds(steps, rounds, dist.barrier, STEPS, what)
    layers_seconds: list[Any] = [None] * num_stages
    dist.all_gather_object(layers_seconds, read_median_seconds())  # noqa: TID251 - between processes of this program
    if rank == 0:
        results.put((found, [statistics.mean(column) for column in zip(*layers_seconds, strict=True)]))
    dist.barrier()
    del pipeline, steps
    dist.destroy_process_group()


def measure_torchgpipe(num_stages: int, num_microbatches: int, rounds: int) -> dict[str, float]:
    """Measure torchgpipe, all of whose CPU partitions share one worker thread."""
    import torchgpipe

    layers = nn.Sequential(*(Sleeper() for _ in range(num_stages)))
    model = torchgpipe.GPipe(
        layers, [1] * num_stages, devices=["cpu"] * num_stages, chunks=num_microbatches, checkpoint="never"
    )
    inputs, targets = torch.randn(num_microbatches, 16), torch.randn(num_microbatches, 16)
    return measure_median_seconds(
        {"torchgpipe, never": lambda: compute_loss(model(inputs), targets).backward()}, rounds
    )


def measure_grid(rounds: int) -> list[dict[str, Any]]:
    """Return one row per engine and setting."""
    context = torch.multiprocessing.get_context("spawn")
    rows = []
    for number, (num_stages, num_microbatches) in enumerate(GRID):
        results = context.SimpleQueue()
        arguments = (num_stages, num_microbatches, rounds, 29650 + number, results)
        torch.multiprocessing.start_processes(measure_processes, arguments, num_stages, start_method="spawn")
        seconds, (forward, backward) = results.get()
        seconds |= measure_torchgpipe(num_stages, num_microbatches, max(rounds // 5, 1))
        for name, value in seconds.items():
            engine, mode = name.split(", ")
            slots = num_microbatches + num_stages - 1
            formula = slots * (FORWARD * (2 if mode == "always" else 1) + BACKWARD)
            row = {"engine": engine, "num_stages": num_stages, "num_microbatches": num_microbatches}
            row |= {"rematerialize": mode, "step_seconds": value, "formula_seconds": formula}
            rows.append(row | {"forward_seconds": forward, "backward_seconds": backward})
    return rows
