"""Hooks of parameters are called once per step, with what the plain model's one backward would give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import gpipe
from gpipe.pipeline.schedules.choice import SCHEDULES
from tests.support.process_pool import ProcessPool


def build() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = (nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3))
        return nn.Sequential(*layers).double()


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).double(), torch.arange(6) % 3


def hang(layers: nn.Module, seen: list[tuple[str, Tensor]]) -> None:
    """Give each weight a hook that halves its gradient, and one that looks at what was accumulated."""
    for name, parameter in layers.named_parameters():
        if name.endswith("weight"):
            parameter.register_hook(lambda g, name=name: seen.append((name, g.clone())) or g / 2)
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.append((f"{name} after", p.grad.clone()))
            )


def train_plain(num_steps: int) -> tuple[nn.Sequential, list[tuple[str, Tensor]]]:
    layers, seen = build(), []
    hang(layers, seen)
    for step in range(num_steps):
        inputs, targets = batch(step)
        F.cross_entropy(layers(inputs), targets).backward()
    return layers, seen


def assert_same(found: list[tuple[str, Tensor]], expected: list[tuple[str, Tensor]]) -> None:
    of_found, of_expected = (sorted((name, i) for i, (name, _) in enumerate(calls)) for calls in (found, expected))
    assert [name for name, _ in of_found] == [name for name, _ in of_expected]
    for (name, i), (_, j) in zip(of_found, of_expected, strict=True):
        torch.testing.assert_close(found[i][1], expected[j][1], rtol=0, atol=1e-13, msg=name)


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hooks_are_called_once_per_step_with_the_whole_gradient(schedule: str, mode: str) -> None:
    """In two steps without zeroing, so that the second gradient is added to the first."""
    layers, seen = build(), []
    hang(layers, seen)
    per_device = 2 if schedule in ("interleaved_1f1b", "zb_v") else 1
    pipeline = gpipe.Pipeline(
        layers, F.cross_entropy, [1, 1, 2, 1], 3, schedule=schedule, stages_per_device=per_device, rematerialize=mode
    )
    for step in range(2):
        pipeline.train_step(batch(step))
    plain, expected = train_plain(2)
    assert_same(seen, expected)
    for parameter, other in zip(layers.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=1e-13)


def train_replica(rank: int) -> list[tuple[str, Tensor]]:
    """Train half of the mini-batch on each of two replicas of two stages; return what the hooks saw."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    layers, seen = build(), []
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, [2, 3], 3, mesh=mesh, schedule="zb_h1")
    hang(pipeline.layers, seen)
    inputs, targets = (part.chunk(2)[pipeline.job.replica_index] for part in batch())
    pipeline.train_step((inputs, targets))
    pipeline.close()
    return seen


def test_replicas_call_them_with_the_gradient_of_all(processes: ProcessPool) -> None:
    _, expected = train_plain(1)
    answers = processes.run(4, train_replica)
    assert_same(answers[0] + answers[1], [*expected])
    assert_same(answers[2] + answers[3], [*expected])


def test_a_hook_that_fails_or_removes_itself_leaves_the_others() -> None:
    layers = build()
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, [2, 3], 3)
    calls: list[Any] = []

    def once(gradient: Tensor) -> None:
        calls.append("once")
        handle.remove()

    def fail(_: Tensor) -> Tensor:
        raise OSError("the disk is full")

    handle = layers[0].weight.register_hook(once)
    layers[0].weight.register_hook(lambda _: calls.append("always"))
    failing = layers[4].weight.register_hook(fail)
    with pytest.raises(OSError, match="the disk is full"):
        pipeline.train_step(batch())
    failing.remove()
    calls.clear()
    for _ in range(2):
        pipeline.train_step(batch())
    assert calls in (["once", "always", "always"], ["always", "always"])
    assert len(layers[0].weight._backward_hooks) == 1


def test_a_step_that_failed_calls_no_hook_and_loses_no_gradient() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if fails:
            raise OSError
        return F.cross_entropy(outputs, targets)

    layers, calls, fails = build(), [], False
    pipeline = gpipe.Pipeline(layers, loss, [2, 3], 3)
    layers[0].weight.register_hook(calls.append)
    pipeline.train_step(batch())
    before, fails = layers[0].weight.grad.clone(), True
    with pytest.raises(gpipe.PipelineError):
        pipeline.train_step(batch())
    assert torch.equal(layers[0].weight.grad, before) and len(calls) == 1
    fails = False
    pipeline.train_step(batch())
    assert len(calls) == 2


def train_with_noise(rank: int, num_replicas: int, partitions: list[int]) -> dict[str, list[float]]:
    """Train with hooks that add noise to gradients; return these."""
    num_stages = 1 if num_replicas == 1 else len(partitions)
    mesh = None
    if num_replicas * num_stages > 1:
        mesh = init_device_mesh("cpu", (num_replicas, num_stages), mesh_dim_names=("replica", "stage"))
    layers = build()
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, partitions, 3, mesh=mesh)
    for parameter in pipeline.parameters():
        parameter.register_hook(torch.randn_like)
    pipeline.train_step(batch())
    return {name: one.grad.flatten().tolist() for name, one in pipeline.named_parameters()}


def test_noise_is_the_same_in_all_replicas_and_for_every_number_of_stages(processes: ProcessPool) -> None:
    expected = train_with_noise(0, 1, [5])
    assert train_with_noise(0, 1, [2, 3]) == expected
    assert processes.run(2, train_with_noise, 2, [5]) == [expected] * 2
