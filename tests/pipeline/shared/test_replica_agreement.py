"""What replicas must have in common, they have, or are told what differs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gpipe
from tests.pipeline.shared.replica_case import (
    Case,
    loss,
    plain_layers,
    whole_batch,
)
from tests.support.process_pool import ProcessPool


def start_from_different_weights(rank: int) -> list[np.ndarray]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))
    pipeline = gpipe.Pipeline(plain_layers(seed=rank), loss, [5], 2, mesh=mesh, timeout_seconds=10)
    inputs, targets = whole_batch(Case((4,)), 0)
    pipeline.train_step((inputs, targets))
    pipeline.close()
    return [parameter.detach().numpy() for parameter in pipeline.parameters()]


def test_replicas_begin_with_the_weights_of_the_first(processes: ProcessPool) -> None:
    for weights in processes.run(2, start_from_different_weights):
        for found, expected in zip(weights, plain_layers(seed=0).parameters(), strict=True):
            assert np.array_equal(found, expected.detach().numpy())


def lose_one_replica_s_example(rank: int) -> tuple[str, float]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))
    pipeline = gpipe.Pipeline(plain_layers(), loss, [5], 2, mesh=mesh, timeout_seconds=10)
    inputs, targets = whole_batch(Case((4,)), 0)
    spoiled = inputs / 0 if rank == 1 else inputs
    with pytest.raises(gpipe.NonFiniteError) as error:
        pipeline.train_step((spoiled, targets))
    for parameter in pipeline.parameters():
        parameter.grad = None
    report = pipeline.train_step((inputs, targets))
    pipeline.close()
    return str(error.value), report.loss


def test_a_loss_that_is_not_finite_in_one_replica_stops_the_step_in_all(processes: ProcessPool) -> None:
    inputs, targets = whole_batch(Case((4,)), 0)
    expected = loss(plain_layers()(inputs), targets)[0].item()
    for message, next_loss in processes.run(2, lose_one_replica_s_example):
        assert "the loss of step 0 is nan in stage 0" in message
        assert next_loss == pytest.approx(expected, rel=1e-12)


def odd_layers(seed: int) -> nn.Sequential:
    """Return a frozen layer with buffers of all kinds, and one that is trained."""
    torch.manual_seed(seed)
    first = nn.Linear(3, 3).requires_grad_(False)
    values = torch.randn(2, 3)
    for name, dtype in (("whole", torch.int16), ("tiny", torch.float8_e4m3fn), ("wide", torch.uint16)):
        first.register_buffer(name, (values.abs() * 9).to(dtype))
    first.register_buffer("strided", torch.randn(4, 2, dtype=torch.float64).t())
    first.register_buffer("expanded", torch.randn(1).expand(5))
    first.register_buffer("single", torch.randn(()))
    first.register_buffer("empty", torch.zeros(0))
    return nn.Sequential(first, nn.Linear(3, 1))


def evaluate_before_any_step(rank: int, num_stages: int) -> tuple[Any, list[bytes]]:
    mesh = init_device_mesh("cpu", (2, num_stages), mesh_dim_names=("replica", "stage"))
    layers = odd_layers(seed=rank // num_stages)
    partitions = [2 // num_stages] * num_stages
    pipeline = gpipe.Pipeline(layers, nn.functional.mse_loss, partitions, 2, mesh=mesh, timeout_seconds=10)
    outputs = pipeline.evaluate(torch.ones(4, 3))
    pipeline.close()
    state = [tensor for layer in pipeline.layers.values() for tensor in layer.state_dict().values()]
    return None if outputs is None else outputs.tolist(), [describe_bytes(tensor) for tensor in state]


def describe_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("num_stages", [1, 2])
def test_replicas_are_equal_before_the_first_step_whatever_is_trained(num_stages: int, processes: ProcessPool) -> None:
    layers = odd_layers(seed=0)
    expected = [[describe_bytes(tensor) for tensor in layer.state_dict().values()] for layer in layers]
    for rank, (outputs, state) in enumerate(processes.run(2 * num_stages, evaluate_before_any_step, num_stages)):
        if outputs is not None:
            assert outputs == layers(torch.ones(4, 3)).tolist()
        assert state == (expected[rank % 2] if num_stages == 2 else [*expected[0], *expected[1]])


def note_in_one_replica(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    pipeline = gpipe.Pipeline(plain_layers(), loss, [2, 3], 2, mesh=mesh, timeout_seconds=10)
    report = pipeline.train_step(whole_batch(Case((4,)), 0), note=(lambda: "why") if rank == 2 else None)
    pipeline.close()
    return report.notes


def test_a_note_of_one_process_reaches_all(processes: ProcessPool) -> None:
    assert processes.run(4, note_in_one_replica) == [[None, None, "why", None]] * 4


def find_error(rank: int, what: str) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))
    layers: list[nn.Module] = [nn.Linear(3, 1)]
    inputs = torch.ones(4, 3)
    if what == "sparse":
        layers.insert(0, nn.Embedding(5, 3, sparse=True))
        inputs = torch.arange(4)
    if what == "grad_dtype":
        layers[0].to(torch.bfloat16).weight.grad_dtype = torch.float32

    def named_loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        error = nn.functional.mse_loss(outputs, targets)
        return error, {f"of {rank}" if what == "metrics" else "error": error}

    pipeline = gpipe.Pipeline(nn.Sequential(*layers), named_loss, [len(layers)], 2, mesh=mesh, timeout_seconds=10)
    try:
        pipeline.train_step((inputs, torch.ones(4, 1)))
        pipeline.clip_gradients(2.0 - rank if what == "clip" else 1.0)
    except (ValueError, gpipe.PipelineError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("sparse", "a gradient is sparse, and replicas average only dense ones; set sparse=False in its layer"),
        ("grad_dtype", "layers.0.weight has the type torch.bfloat16, but its gradient, which replicas average, has"),
        ("metrics", "the list of metrics is ['of 0'] in replica 0 and ['of 1'] in replica 1; give every process the"),
        ("clip", "max_norm is 2.0 in replica 0 and 1.0 in replica 1; give every process the same"),
    ],
)
def test_what_replicas_cannot_agree_on_is_refused(what: str, message: str, processes: ProcessPool) -> None:
    assert all(message in found for found in processes.run(2, find_error, what))


def fail_in_an_exchange(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))
    pipeline = gpipe.Pipeline(nn.Sequential(nn.Linear(3, 1)), nn.functional.mse_loss, [1], 1, mesh=mesh)
    try:
        with pipeline.job.replicas.exchange():
            raise RuntimeError("on purpose")
    except Exception as error:  # noqa: BLE001 - which one it is, is the test
        return f"{type(error).__name__}: {error}"
    finally:
        pipeline.close()


def test_an_error_in_an_exchange_is_not_taken_for_a_lost_replica(processes: ProcessPool) -> None:
    assert processes.run(2, fail_in_an_exchange) == ["RuntimeError: on purpose"] * 2
