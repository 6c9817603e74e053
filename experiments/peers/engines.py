"""Three engines that train the same weights on the same mini-batch: ours and those of two peers."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import Parameter

import gpipe
from experiments.peers.stages import SEED, Recomputed, make_boundaries, make_stage_layers
from experiments.peers.workloads import Workload, compute_loss
from gpipe.pipeline.partition import partition_ranges


class Place(NamedTuple):
    """The place of this process among the processes and devices.

    Attributes:
        rank: of this process.
        num_processes: one, or one per stage.
        devices: of all stages.
        mesh: of the processes, if there are several.
    """

    rank: int
    num_processes: int
    devices: list[torch.device]
    mesh: DeviceMesh | None


class Engine(NamedTuple):
    """A training step up to the gradients, and this process's parameters as layers.<index in the model>.<name>."""

    step: Callable[[], object]
    parameters: dict[str, Parameter]


def make_ours(workload: Workload, partitions: Sequence[int], num_microbatches: int, place: Place) -> Engine:
    """Make our engine; unlike the peers, its batch norms average over mini-batches."""
    pipeline = gpipe.Pipeline(
        gpipe.convert_batch_norm(workload.layers()),
        compute_loss,
        partitions,
        num_microbatches,
        rematerialize="always",
        devices=place.devices if place.mesh is None else place.devices[place.rank],
        mesh=place.mesh,
        seed=SEED,
    )
    batch = workload.batch()
    batch = batch[0].to(place.devices[0]), batch[1].to(place.devices[-1])
    return _make_engine(dict(pipeline.named_parameters()), lambda: pipeline.train_step(batch))


def make_torch_pipelining(workload: Workload, partitions: Sequence[int], num_microbatches: int, place: Place) -> Engine:
    """Make torch's GPipe, which has one stage per process; torch.utils.checkpoint recomputes the stage."""
    rank, num_stages = place.rank, len(partitions)
    device = place.devices[rank]
    own = make_stage_layers(workload, partition_ranges(partitions)[rank], device)
    examples = make_boundaries(workload, partitions, num_microbatches, device)
    stage = PipelineStage(
        Recomputed(own.values()),
        rank,
        num_stages,
        device,
        input_args=examples[rank],
        output_args=examples[rank + 1],
    )
    schedule = ScheduleGPipe(stage, num_microbatches, loss_fn=compute_loss)
    inputs, targets = workload.batch(device)
    arguments = (inputs,) if rank == 0 else ()
    target = targets if rank == num_stages - 1 else None
    # By default it would hold and join all logits, unlike the others.
    return _make_engine(_name_parameters(own), lambda: schedule.step(*arguments, target=target, return_outputs=False))


def make_torchgpipe(workload: Workload, partitions: Sequence[int], num_microbatches: int, place: Place) -> Engine:
    """Make torchgpipe's engine, which has all stages in one process."""
    from torchgpipe import GPipe

    devices = place.devices
    ranges = partition_ranges(partitions)
    own = {
        i: layer for k, part in enumerate(ranges) for i, layer in make_stage_layers(workload, part, devices[k]).items()
    }
    model = GPipe(
        nn.Sequential(*own.values()), partitions, devices=devices, chunks=num_microbatches, checkpoint="always"
    )
    batch = workload.batch()
    inputs, targets = batch[0].to(devices[0]), batch[1].to(devices[-1])
    return _make_engine(_name_parameters(own), lambda: compute_loss(model(inputs), targets).backward())


ENGINES = {"ours": make_ours, "torch.distributed.pipelining": make_torch_pipelining, "torchgpipe": make_torchgpipe}


def count_processes(engine: str, num_processes: int) -> int:
    """Return how many of the processes an engine uses."""
    return 1 if engine == "torchgpipe" else num_processes


def explain_not_run(engine: str, num_stages: int, num_processes: int) -> str | None:
    """Return why an engine cannot run this number of stages in this number of processes; None if it can."""
    if engine == "torch.distributed.pipelining" and num_stages != num_processes:
        return "not run: it needs one GPU per stage"
    return None


def _make_engine(parameters: dict[str, Parameter], train: Callable[[], object]) -> Engine:
    def step() -> None:
        for parameter in parameters.values():
            parameter.grad = None
        train()

    return Engine(step, parameters)


def _name_parameters(layers: dict[int, nn.Module]) -> dict[str, Parameter]:
    return {f"layers.{i}.{name}": p for i, layer in layers.items() for name, p in layer.named_parameters()}
