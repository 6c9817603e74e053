"""The programs that run on the simulated GPUs: each function returns what the simulation counted, by name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import gpipe
from experiments.loss_cost import LENGTH, VOCABULARY, WAYS, make_targets
from experiments.planned_memory.small_models import MICROBATCH_SIZE, make_text_model
from experiments.replica_wait import AwaitedInBackward
from gpipe.models import amoebanet_d
from gpipe.pipeline.schedule import Kind, Task
from gpipe.planning.ledger import count_moved_bytes
from tests.simulated_cuda import ledger, nccl, streams

NUM_TOKENS = 1024  # a quarter of a micro-batch of the translation models: the bytes are in proportion
NUM_MICROBATCHES = 8
WIDTH = 64  # of the layers whose gradients are averaged
_NUM_LAYERS = 8
Counts = dict[str, int | None]


def count(work: Callable[[], Any]) -> Counts:
    """Do some work; return what it took in this process."""
    moved = 0

    def note(func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        nonlocal moved
        moved += count_moved_bytes(func, args, kwargs, outputs)

    devices = range(torch.cuda.device_count())
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    before = sum(map(torch.cuda.memory_allocated, devices))
    ledger.forget()
    ledger.on_kernel = note
    work()
    ledger.on_kernel = None
    kernels, graphs = (
        sum(number for name, number in ledger.counts.items() if name.startswith(what))
        for what in ("kernels on ", "graphs on ")
    )
    return {
        "kernels": kernels,
        "launches": kernels - ledger.counts["kernels in graphs"] + graphs,
        "bytes_moved": moved,
        "peak_bytes": sum(map(torch.cuda.max_memory_allocated, devices)) - before,
        "host_synchronisations": ledger.counts["host synchronisations"],
        "stream_waits": ledger.counts["waits of default streams"],
        "nccl_operations": ledger.counts["NCCL operations"],
        "averages_before_gradients": 0,
    }


def count_averaging(_rank: int, is_awaited: bool) -> Counts:
    """Count a step of two stages and two replicas in one of their processes.

    is_awaited: within each stage's last backward.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(_NUM_LAYERS)))
    halves = [_NUM_LAYERS // 2] * 2
    pipeline = gpipe.Pipeline(
        layers, F.mse_loss, halves, NUM_MICROBATCHES, mesh=mesh, devices=f"cuda:{torch.cuda.current_device()}"
    )
    if is_awaited:
        for stage in pipeline.stages.values():
            stage.averaging = AwaitedInBackward(stage.layers, pipeline.job.replicas)
    inputs, targets = (torch.randn(MICROBATCH_SIZE * NUM_MICROBATCHES, WIDTH) for _ in range(2))
    batch = inputs if pipeline.is_first else None, targets if pipeline.is_last else None
    pipeline.train_step(batch)
    averages, send = pipeline.job.replicas.group, pipeline.job.transfer.send
    assert isinstance(averages, nccl.NCCL)
    before, behind = averages.num_operations, 0

    def watch(task: Task, payload: Any) -> None:
        nonlocal behind
        if task.kind.direction is Kind.BACKWARD:
            behind += averages.find_position(streams.current_stream().clock) - before
        send(task, payload)

    pipeline.job.transfer.send = watch  # type: ignore[method-assign]
    found = count(lambda: pipeline.train_step(batch))
    pipeline.close()
    return found | {"averages_before_gradients": behind}


def count_loss(_rank: int, what: str, number: int, num_tokens: int = NUM_TOKENS) -> Counts:
    """Count one of the ways to compute the loss of a micro-batch, and in training its gradient."""
    loss, trains = WAYS[what][number], what == "training"
    logits = torch.randn(num_tokens // LENGTH, LENGTH, VOCABULARY).bfloat16().cuda().requires_grad_(trains)
    targets = {name: values.cuda() for name, values in make_targets(num_tokens, "cpu").items()}

    def work() -> None:
        found = loss(logits, targets)
        if trains:
            torch.autograd.grad(found[0], logits)

    return count(work)


def count_images(_rank: int, mode: str, cuda_graphs: bool, num_microbatches: int = NUM_MICROBATCHES) -> Counts:
    """Count a step of AmoebaNet-D (3,8) with drop-path, the third one of one GPU.

    mode: of re-materialisation. cuda_graphs: whether each layer is one.
    """
    layers = gpipe.convert_batch_norm(amoebanet_d(3, 8, 10, image_size=32, drop_path=0.2))
    assert isinstance(layers, nn.Sequential)
    loss, whole = F.cross_entropy, [len(layers)]
    pipeline = gpipe.Pipeline(layers, loss, whole, num_microbatches, rematerialize=mode, devices="cuda")
    if cuda_graphs:
        pipeline.use_cuda_graphs()
    batch = torch.randn(2 * num_microbatches, 3, 32, 32), torch.zeros(2 * num_microbatches, dtype=torch.int64)

    def work() -> None:
        pipeline.train_step(batch)

    for _ in range(2):  # graphs are captured meanwhile
        work()
    found = count(work)
    return found | {"peak_bytes": None} if cuda_graphs else found  # theirs is there before


def count_step(_rank: int, mode: str, keeps_copies: bool, num_microbatches: int = NUM_MICROBATCHES) -> Counts:
    """Count a step under autocast in one process with two GPUs.

    mode: of re-materialisation. keeps_copies: whether all uses of a weight share a copy of it.
    """
    model = make_text_model()
    half = len(model.layers) // 2
    partitions = [half, len(model.layers) - half]
    devices = ["cuda:0", "cuda:1"]
    pipeline = gpipe.Pipeline(
        model.layers, model.loss, partitions, num_microbatches, rematerialize=mode, devices=devices
    )
    batch = model.batch(MICROBATCH_SIZE * num_microbatches)

    def work() -> None:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=keeps_copies):
            pipeline.train_step(batch)

    work()
    return count(work)
