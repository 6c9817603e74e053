"""How close the engine comes to the bubble formula, beside its peers; and what it costs at K = 1.

    python experiments/engine_overhead.py

Layers that sleep a set time take the processor out of the measurement: K = 8 processes overlap on two cores. Every
engine runs the same stages, K processes over Gloo (torchgpipe: one process, its only way), in turns; medians count.
Appends a record to reproductions/bubble/runs.jsonl and renders its README. About four minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import gpipe
from gpipe.models import amoebanet_d
from gpipe.results.records import append_record, make_record
from gpipe.results.reproduction import render

FORWARD, BACKWARD = 0.004, 0.008
ROOT = Path(__file__).parent.parent


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        time.sleep(BACKWARD)
        return gradient


class Sleeper(nn.Module):
    """A layer of 4 ms forward and 8 ms backward, with one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the weight, later; any shape."""
        return _Sleep.apply(x) * self.weight


def square(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error."""
    return (outputs - targets).square().mean()


def median_seconds(
    steps: dict[str, Callable[[], object]], rounds: int, fence: Callable[[], object]
) -> dict[str, float]:
    """Run the steps in turns; return each one's median."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            fence()
            start = time.perf_counter()
            step()
            fence()
            if turn > 0:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure_processes(rank: int, num_stages: int, num_microbatches: int, rounds: int, port: int, results: Any) -> None:
    """Measure ours and torch's in one process of K."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_stages)
    mesh = init_device_mesh("cpu", (1, num_stages), mesh_dim_names=("replica", "stage"))
    batch = torch.randn(num_microbatches, 16), torch.randn(num_microbatches, 16)
    inputs = batch[:1] if rank == 0 else ()
    steps: dict[str, Callable[[], object]] = {}
    for mode in ("never", "always"):
        layers = nn.Sequential(*(Sleeper() for _ in range(num_stages)))
        pipeline = gpipe.Pipeline(layers, square, [1] * num_stages, num_microbatches, rematerialize=mode, mesh=mesh)
        steps[f"ours, {mode}"] = lambda pipeline=pipeline: pipeline.train_step(batch)
    example = torch.randn(1, 16, requires_grad=True)
    stage = PipelineStage(
        Sleeper(), rank, num_stages, torch.device("cpu"), input_args=(example,), output_args=(example.clone(),)
    )
    schedule = ScheduleGPipe(stage, num_microbatches, loss_fn=square)
    target = batch[1] if rank == num_stages - 1 else None
    steps["torch.distributed.pipelining, never"] = lambda: schedule.step(*inputs, target=target)
    found = median_seconds(steps, rounds, dist.barrier)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def measure_torchgpipe(num_stages: int, num_microbatches: int, rounds: int) -> dict[str, float]:
    """Measure torchgpipe, all of whose CPU partitions share one worker thread."""
    import torchgpipe

    layers = nn.Sequential(*(Sleeper() for _ in range(num_stages)))
    model = torchgpipe.GPipe(
        layers, [1] * num_stages, devices=["cpu"] * num_stages, chunks=num_microbatches, checkpoint="never"
    )
    inputs, targets = torch.randn(num_microbatches, 16), torch.randn(num_microbatches, 16)
    return median_seconds({"torchgpipe, never": lambda: square(model(inputs), targets).backward()}, rounds, int)


def measure_grid(rounds: int) -> list[dict[str, Any]]:
    """Return a row an engine and a setting."""
    context = torch.multiprocessing.get_context("spawn")
    rows = []
    for number, (num_stages, num_microbatches) in enumerate([(2, 8), (4, 16), (8, 32)]):
        results = context.SimpleQueue()
        arguments = (num_stages, num_microbatches, rounds, 29650 + number, results)
        torch.multiprocessing.start_processes(measure_processes, arguments, num_stages, start_method="spawn")
        seconds = results.get() | measure_torchgpipe(num_stages, num_microbatches, max(rounds // 5, 1))
        for name, value in seconds.items():
            engine, mode = name.split(", ")
            recompute = FORWARD if mode == "always" else 0.0
            formula = (num_microbatches + num_stages - 1) * (FORWARD + recompute + BACKWARD)
            row = {"engine": engine, "num_stages": num_stages, "num_microbatches": num_microbatches}
            rows.append(row | {"rematerialize": mode, "step_seconds": value, "formula_seconds": formula})
            setting = f"K={num_stages} M={num_microbatches:2} {name:36}"
            print(f"{setting} {value * 1e3:7.1f} ms, {formula / value:.3f}", flush=True)
    return rows


def measure_one_stage(rounds: int) -> dict[str, float]:
    """Compare a one-stage pipeline with a hand-written loop over micro-batches, on a small AmoebaNet-D."""
    torch.set_num_threads(1)
    plain = amoebanet_d(6, 32, 10, image_channels=1)
    pipeline = gpipe.Pipeline(
        gpipe.convert_batch_norm(amoebanet_d(6, 32, 10, image_channels=1)),
        nn.functional.cross_entropy, [len(plain)], 4, rematerialize="never",
    )  # fmt: skip
    images, labels = torch.randn(32, 1, 64, 64), torch.randint(10, (32,))

    def loop() -> None:
        for inputs, targets in zip(images.split(8), labels.split(8), strict=True):
            (nn.functional.cross_entropy(plain(inputs), targets) * (len(inputs) / 32)).backward()

    steps = {"hand-written loop": loop, "ours": lambda: pipeline.train_step((images, labels))}
    seconds = median_seconds(steps, rounds, int)
    print(f"K=1: {seconds['ours'] / seconds['hand-written loop']:.3f} of the loop's time", flush=True)
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="steps of each engine that count")
    options = parser.parse_args()
    found = {"grid": measure_grid(options.rounds), "one_stage": measure_one_stage(options.rounds)}
    settings = {"forward_seconds": FORWARD, "backward_seconds": BACKWARD, "rounds": options.rounds}
    append_record(
        ROOT / "reproductions" / "bubble" / "runs.jsonl",
        make_record(kind="measured", command=f"python {' '.join(sys.argv)}", experiment="engine_overhead",
                    config=settings, seed=0, results=found),
    )  # fmt: skip
    render(ROOT)
