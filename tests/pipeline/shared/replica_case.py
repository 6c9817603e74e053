"""Two replicas of a pipeline, and the plain model that trains on all their mini-batches together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gpipe
from tests.support.gate import Gate
from tests.support.ghost_batch_norm import Ghost
from tests.support.process_pool import ProcessPool

PADDING = -100
MODES = ("always", "except_last", "never")


@dataclass(frozen=True)
class Layout:
    """Two replicas of a pipeline, and its number of processes."""

    num_devices: int
    partitions: tuple[int, ...]
    schedule: str = "gpipe"

    @property
    def stages_per_device(self) -> int:
        return len(self.partitions) // self.num_devices

    def run(self, processes: ProcessPool, cases: list[Case]) -> list[list[Outcome]]:
        return processes.run(2 * self.num_devices, train, self, cases)


LAYOUTS = (
    Layout(1, (5,)),
    Layout(2, (2, 3)),
    Layout(2, (1, 1, 1, 2), "interleaved_1f1b"),
    Layout(2, (1, 1, 1, 2), "zb_v"),
)


def plain_layers(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(Gate(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 5)).double()


def normalized_layers() -> nn.Sequential:
    """Return layers whose batch norms each come first, so that they see what they see in the plain model."""
    _, *rest = plain_layers()
    return nn.Sequential(nn.BatchNorm1d(6, momentum=None).double(), *rest)


def normalized_in_the_middle() -> nn.Sequential:
    layers = plain_layers()
    layers[2] = nn.BatchNorm1d(8, momentum=0.3).double()
    return layers


def ghostly() -> nn.Sequential:
    """Return layers whose first batch norm has more averages than features, and whose second is not used."""
    _, *rest = plain_layers()
    rest[1].idle = nn.BatchNorm1d(6).double()
    return nn.Sequential(Ghost(6).double(), *rest)


def dropped() -> nn.Sequential:
    layers = plain_layers()
    layers[0], layers[2] = nn.Dropout(0.4), nn.Sequential(nn.Tanh(), nn.Dropout(0.2))
    return layers


@dataclass(frozen=True)
class Case:
    """What replicas train on.

    Attributes:
        sizes: examples of each replica.
        gated: the examples, counted over all replicas, that use the gate's weight.
        weighted: whether targets are tokens with padding, each counting alike.
        zero_grad: whether gradients are cleared between steps.
    """

    sizes: tuple[int, ...]
    mode: str = "always"
    num_microbatches: int = 4
    gated: tuple[int, ...] = ()
    weighted: bool = False
    num_steps: int = 1
    zero_grad: bool = True
    frozen_at_first: tuple[int, ...] = ()
    layers: Callable[[], nn.Sequential] = plain_layers


@dataclass
class Outcome:
    """What one process has after its steps; by name."""

    losses: list[float]
    metrics: list[dict[str, float]]
    gradients: list[dict[str, np.ndarray | None]]
    state: dict[str, np.ndarray]


def gates_alone() -> nn.Sequential:
    """Return layers whose first stages own a gate and nothing else."""
    gate, first, _, second, third = plain_layers()
    return nn.Sequential(nn.Identity(), gate, first, second, third)


class Pair(nn.Module):
    """Returns, beside the tensor, one that its own weight makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 0.3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x * self.weight


class First(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0]


def output_that_nobody_uses() -> nn.Sequential:
    gate, first, _, second, third = plain_layers()
    return nn.Sequential(gate, Pair().double(), First(), nn.Sequential(first, second), third)


def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    kept = targets != PADDING
    right = (outputs.argmax(-1) == targets)[kept].double().mean()
    return nn.functional.cross_entropy(outputs[kept], targets[kept]), {"right": right}


def num_tokens(targets: Tensor) -> float:
    return float((targets != PADDING).sum())


def whole_batch(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """Return the examples of all replicas in order."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(sum(case.sizes), 6, generator=generator, dtype=torch.float64)
    inputs[list(case.gated), 0] = 11.0
    targets = torch.randint(5, (sum(case.sizes),), generator=generator)
    if case.weighted:
        targets[1::3] = PADDING
    return inputs, targets


def train(rank: int, layout: Layout, cases: list[Case]) -> list[Outcome]:
    mesh = init_device_mesh("cpu", (2, layout.num_devices), mesh_dim_names=("replica", "stage"))
    return [_train(case, mesh, layout) for case in cases]


def _train(case: Case, mesh: Any, layout: Layout) -> Outcome:
    layers = gpipe.convert_batch_norm(case.layers())
    pipeline = gpipe.Pipeline(
        layers, loss, layout.partitions, case.num_microbatches, rematerialize=case.mode, mesh=mesh,
        schedule=layout.schedule, stages_per_device=layout.stages_per_device,
        loss_weight=num_tokens if case.weighted else None, timeout_seconds=10,
    )  # fmt: skip
    for index in case.frozen_at_first:
        layers[index].requires_grad_(False)
    optimizer = torch.optim.SGD([*pipeline.parameters(), torch.zeros(1, requires_grad=True)], lr=0.1)
    outcome = Outcome([], [], [], {})
    for step in range(case.num_steps):
        inputs, targets = (part.split(case.sizes)[pipeline.job.replica_index] for part in whole_batch(case, step))
        report = pipeline.train_step((inputs if pipeline.is_first else None, targets if pipeline.is_last else None))
        outcome.losses.append(report.loss)
        outcome.metrics.append(report.metrics)
        outcome.gradients.append(
            {name: None if p.grad is None else p.grad.numpy().copy() for name, p in pipeline.named_parameters()}
        )
        if case.zero_grad:
            optimizer.step()
            optimizer.zero_grad()
        layers.requires_grad_()
    outcome.state = {f"layers.{name}": value.numpy() for name, value in pipeline.layers.state_dict().items()}
    pipeline.close()
    return outcome


def plain(case: Case) -> Outcome:
    """Train the plain model on everything at once."""
    layers = case.layers()
    for index in case.frozen_at_first:
        layers[index].requires_grad_(False)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    outcome = Outcome([], [], [], {})
    for step in range(case.num_steps):
        inputs, targets = whole_batch(case, step)
        value, metrics = loss(layers(inputs), targets)
        value.backward()
        outcome.losses.append(value.item())
        outcome.metrics.append({name: metric.item() for name, metric in metrics.items()})
        outcome.gradients.append(
            {
                f"layers.{name}": None if p.grad is None else p.grad.numpy().copy()
                for name, p in layers.named_parameters()
            }
        )
        if case.zero_grad:
            optimizer.step()
            optimizer.zero_grad()
        layers.requires_grad_()
    outcome.state = {f"layers.{name}": value.numpy() for name, value in layers.state_dict().items()}
    return outcome


def assert_equal_to_plain(processes: ProcessPool, layout: Layout, cases: list[Case]) -> None:
    answers = layout.run(processes, cases)
    for number, case in enumerate(cases):
        expected = plain(case)
        for rank, outcomes in enumerate(answers):
            found, where = outcomes[number], f"rank {rank}, {case}"
            assert found.losses == pytest.approx(expected.losses, rel=1e-12), where
            assert found.metrics == [pytest.approx(metrics, rel=1e-12) for metrics in expected.metrics], where
            for step, gradients in enumerate(found.gradients):
                for name, gradient in gradients.items():
                    assert_close(gradient, expected.gradients[step][name], f"{where}, step {step}, gradient of {name}")
            for name, value in found.state.items():
                assert_close(value, expected.state[name], f"{where}, {name}")


def assert_close(found: np.ndarray | None, expected: np.ndarray | None, what: str) -> None:
    if found is None or expected is None:
        assert found is expected, f"{what} is {'missing' if found is None else 'there'}"
    else:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12, err_msg=what)


Value = TypeVar("Value")


def with_modes(layout: Layout, values: Iterable[Value]) -> list[tuple[Value, str]]:
    """Return each value with one of the modes: any three layouts in a row have all pairs."""
    turn = LAYOUTS.index(layout)
    return [(value, MODES[(turn + place) % len(MODES)]) for place, value in enumerate(values)]
