"""A wrong call is one sentence, on all processes."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gpipe
from gpipe.pipeline.job.messages import Messenger
from tests.pipeline.wire.mixed_layers import images, mean_output, mixed_layers, stages
from tests.support.process_pool import ProcessPool


def errors_of(rank: int, what: str) -> tuple[str, str]:
    """Make a mistake and return the error's type and text."""
    try:
        MISTAKES[what](rank)
    except Exception as error:  # noqa: BLE001 - what is raised is the test
        return type(error).__name__, str(error)
    return "nothing", ""


def _other_targets(rank: int) -> None:
    pipeline = gpipe.Pipeline(mixed_layers(), mean_output, (2, 2, 2), 4, mesh=stages(3), timeout_seconds=10)
    pipeline.train_step((images(8), torch.ones(6, 1)))


def _other_num_microbatches(rank: int) -> None:
    mesh = stages(3)
    pipeline = gpipe.Pipeline(mixed_layers(), mean_output, (2, 2, 2), 4 - rank, mesh=mesh, timeout_seconds=10)
    pipeline.train_step((images(8), torch.ones(8, 1)))


def _late_to_hear(rank: int) -> None:
    receive = Messenger.receive

    def receive_late(self: Messenger, peer: int) -> Any:
        time.sleep(1 if rank == 2 else 0)
        return receive(self, peer)

    with mock.patch.object(Messenger, "receive", receive_late):
        _other_num_microbatches(rank)


def _other_partitions(rank: int) -> None:
    partitions = (2, 2, 2) if rank < 2 else (1, 3, 2)
    gpipe.Pipeline(mixed_layers(), mean_output, partitions, 4, mesh=stages(3), timeout_seconds=10)


class MakeSet(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"tensor": x, "numbers": {1, 2}}


def _unfit_payload(rank: int) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 3, 1), MakeSet(), nn.Identity())
    pipeline = gpipe.Pipeline(layers, mean_output, (1, 1, 1), 2, mesh=stages(3), timeout_seconds=10)
    pipeline.train_step((images(4), torch.ones(4, 1)))


class MakeMeta(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, x.new_empty(2, device="meta")


def _payload_without_memory(rank: int) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 3, 1), MakeMeta(), nn.Identity())
    pipeline = gpipe.Pipeline(layers, mean_output, (1, 1, 1), 2, mesh=stages(3), timeout_seconds=10)
    pipeline.train_step((images(4), torch.ones(4, 1)))


class Quantize(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)


def _quantized_payload(rank: int) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 3, 1), Quantize(), nn.Identity())
    pipeline = gpipe.Pipeline(layers, mean_output, (1, 1, 1), 2, mesh=stages(3), timeout_seconds=10)
    pipeline.train_step((images(4), torch.ones(4, 1)))


def _ranks_that_descend(rank: int) -> None:
    mesh = DeviceMesh("cpu", torch.tensor([0, 2, 1]), mesh_dim_names=("stage",))
    gpipe.Pipeline(mixed_layers(), mean_output, (2, 2, 2), 2, mesh=mesh, timeout_seconds=10)


class MakeSparse(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.to_sparse()


def _sparse_payload(rank: int) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 3, 1), MakeSparse(), nn.Identity())
    pipeline = gpipe.Pipeline(layers, mean_output, (1, 1, 1), 2, mesh=stages(3), timeout_seconds=10)
    pipeline.train_step((images(4), torch.ones(4, 1)))


def _other_number_of_stages(rank: int) -> None:
    gpipe.Pipeline(mixed_layers(), mean_output, (3, 3), 4, mesh=stages(3), timeout_seconds=10)


def _other_number_of_devices(rank: int) -> None:
    settings = {"schedule": "interleaved_1f1b", "stages_per_device": 3, "mesh": stages(3)}
    gpipe.Pipeline(mixed_layers(), mean_output, (1, 1, 1, 1, 1, 1), 4, timeout_seconds=10, **settings)


def _other_names(rank: int) -> None:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("pp",))
    gpipe.Pipeline(mixed_layers(), mean_output, (2, 2, 2), 4, mesh=mesh, timeout_seconds=10)


def _too_few_processes(rank: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("stage",))
    dist.barrier()  # one that ends would break the other's connecting
    gpipe.Pipeline(mixed_layers(), mean_output, (3, 3), 4, mesh=mesh, timeout_seconds=10)


MISTAKES = {function.__name__: function for function in (
    _other_targets, _other_num_microbatches, _late_to_hear, _other_partitions, _unfit_payload, _sparse_payload,
    _payload_without_memory, _quantized_payload, _ranks_that_descend,
    _other_number_of_stages, _other_number_of_devices, _other_names, _too_few_processes,
)}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "cause", "culprit", "text"),
    [
        ("_other_targets", "ValueError", 2, "the mini-batch has 8 inputs and 6 targets"),
        ("_other_num_microbatches", "ValueError", None, "num_microbatches is 4 in stage 0 and 3 in stage 1"),
        ("_late_to_hear", "ValueError", None, "num_microbatches is 4 in stage 0 and 3 in stage 1"),
        ("_other_partitions", "ValueError", None, "partitions is [2, 2, 2] in stage 0 and [1, 3, 2] in stage 2"),
        ("_unfit_payload", "PipelineError", 1, "the payload['numbers'] is of type set ({1, 2})"),
        ("_sparse_payload", "PipelineError", 1, "the payload is a tensor of layout torch.sparse_coo"),
        (
            "_payload_without_memory",
            "PipelineError",
            1,
            "a tensor of shape (2,) on the meta device, which has no plain",
        ),
        (
            "_quantized_payload",
            "PipelineError",
            1,
            "of the type torch.qint8, Tensor, which has no plain values in memory",
        ),
        ("_ranks_that_descend", "ValueError", None, "the mesh has the rows [[0, 2, 1]]; ranks must ascend in each row"),
        ("_other_number_of_stages", "ValueError", None, "the mesh has 3 stages, but 2 partitions need 2 with stages"),
        ("_other_number_of_devices", "ValueError", None, "3 stages, but 6 partitions need 2 with stages_per_device=3;"),
        ("_other_names", "ValueError", None, "the mesh has the dimensions ('pp',)"),
        ("_too_few_processes", "ValueError", None, "the mesh holds 2 of the job's 3 processes"),
    ],
)
def test_a_mistake_is_one_sentence_on_all_processes(
    what: str, cause: str, culprit: int | None, text: str, processes: ProcessPool
) -> None:
    for rank, (kind, message) in enumerate(processes.run(3, errors_of, what)):
        assert kind == (cause if culprit in (None, rank) else "PeerFailure"), f"rank {rank}: {kind}: {message}"
        assert text in message and "\n" not in message, f"rank {rank}: {message}"
