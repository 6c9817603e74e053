"""What replicas with synchronised batch norms train on, and what one process makes of all of it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

import gpipe
import gpipe._compat.torchvision  # before timm
from gpipe.pipeline.microbatch import microbatch_sizes

from timm.layers import BatchNormAct2d  # isort: skip


MODES = ("always", "except_last", "never")
PADDING = -100
NUM_REPLICAS = 2


class Branches(nn.Module):
    """Has norms in parallel branches, and one that both of them use."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.shared = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=0.3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.right(x).sin()) + self.left(x * x) * self.shared(x + 1)


def build() -> nn.Sequential:
    """Return layers with all kinds of batch norms; those behind the pooling see one value per example."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Conv2d(3, 4, 1),
            Branches(),
            BatchNormAct2d(4),
            nn.Sequential(nn.Conv2d(4, 6, 2), nn.BatchNorm2d(6, affine=False)),
            nn.Sequential(nn.Tanh(), nn.BatchNorm2d(6, momentum=None), nn.BatchNorm2d(6, track_running_stats=False)),
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)),
            nn.BatchNorm1d(5),
            nn.Linear(5, 3),
        )
    return layers.double()


@dataclass(frozen=True)
class Layout:
    """Replicas of a pipeline, and its number of processes."""

    partitions: tuple[int, ...]
    schedule: str = "gpipe"
    stages_per_device: int = 1

    @property
    def num_devices(self) -> int:
        return len(self.partitions) // self.stages_per_device


@dataclass(frozen=True)
class Case:
    """What replicas train on.

    Attributes:
        sizes: examples of each replica.
        padding: the examples, counted over all replicas, that have no target.
        frozen: layers that are not trained.
    """

    sizes: tuple[int, ...] = (6, 6)
    num_microbatches: int = 3
    mode: str = "always"
    padding: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    layers: Callable[[], nn.Sequential] = build
    dtype: torch.dtype = torch.float64
    synchronized: bool = True

    def build(self) -> nn.Sequential:
        """Return the layers."""
        layers = self.layers().to(self.dtype)
        for index in self.frozen:
            layers[index].requires_grad_(False)
        return layers

    def batch(self, step: int = 0) -> tuple[Tensor, Tensor]:
        """Return the examples of all replicas, in order."""
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(sum(self.sizes), 3, 3, 3, generator=generator, dtype=torch.float64) * 2 + 5
        targets = torch.randint(3, (sum(self.sizes),), generator=generator)
        targets[list(self.padding)] = PADDING
        return inputs.to(self.dtype), targets

    def micro_batches(self) -> list[list[Tensor]]:
        """Return, for each micro-batch, which examples each replica has of it."""
        num_microbatches = min(self.num_microbatches, *self.sizes)
        parts = [
            own.split(microbatch_sizes(len(own), num_microbatches))
            for own in torch.arange(sum(self.sizes)).split(self.sizes)
        ]
        return [list(rows) for rows in zip(*parts, strict=True)]


State = dict[str, np.ndarray]


def num_targets(targets: Tensor) -> float:
    return float((targets != PADDING).sum())


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, ignore_index=PADDING)


def pipeline_of(case: Case, layout: Layout, mesh: Any) -> gpipe.Pipeline:
    layers = gpipe.convert_batch_norm(case.build())
    assert isinstance(layers, nn.Sequential)
    return gpipe.Pipeline(
        layers, mean_loss, layout.partitions, case.num_microbatches, rematerialize=case.mode, mesh=mesh,
        schedule=layout.schedule, stages_per_device=layout.stages_per_device, loss_weight=num_targets,
        timeout_seconds=10, synchronize_batch_norm=case.synchronized,
    )  # fmt: skip


def mesh_of(layout: Layout, num_replicas: int = NUM_REPLICAS) -> Any:
    return init_device_mesh("cpu", (num_replicas, layout.num_devices), mesh_dim_names=("replica", "stage"))


def train(rank: int, layout: Layout, cases: list[Case]) -> list[State]:
    """Return what each case leaves on this process: gradients of the first step, buffers after two, and the outputs."""
    mesh = mesh_of(layout)
    return [train_case(case, layout, mesh) for case in cases]


def train_case(case: Case, layout: Layout, mesh: Any) -> State:
    pipeline = pipeline_of(case, layout, mesh)
    found: State = {}
    for step in range(2):
        inputs, targets = (part.split(case.sizes)[pipeline.job.replica_index] for part in case.batch(step))
        pipeline.train_step((inputs, targets))
        for name, parameter in pipeline.named_parameters():
            if step == 0 and parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad.numpy().copy()
    found |= {f"layers.{name}": buffer.numpy() for name, buffer in pipeline.layers.named_buffers()}
    pipeline.close()
    return found


def plain(case: Case) -> State:
    """Train the plain model on each micro-batch of all replicas; then move the averages by all that each norm saw."""
    layers, found = case.build(), {}
    norms = {name: module for name, module in layers.named_modules() if isinstance(module, _BatchNorm)}
    averages = copy.deepcopy(norms)
    seen: dict[str, list[Tensor]] = defaultdict(list)
    for name, norm in norms.items():
        norm.register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0].detach().clone()))
    for step in range(2):
        seen.clear()
        inputs, targets = case.batch(step)
        for rows in case.micro_batches():
            together = torch.cat(rows)
            share = F.cross_entropy(layers(inputs[together]), targets[together], reduction="sum", ignore_index=PADDING)
            (share / num_targets(targets)).backward()
        if step == 0:
            gradients = {f"gradient of layers.{name}": p.grad for name, p in layers.named_parameters()}
            found |= {name: gradient.numpy().copy() for name, gradient in gradients.items() if gradient is not None}
        for name, norm in averages.items():
            norm(torch.cat(seen[name]))
    for name, norm in averages.items():
        found |= {f"layers.{name}.{buffer}": value.numpy() for buffer, value in norm.named_buffers()}
    return found


def join_answers(answers: Sequence[Sequence[State]], number: int, layout: Layout) -> list[State]:
    """Return what each replica's processes have together of one case."""
    states = [answer[number] for answer in answers]
    size = layout.num_devices
    return [
        {name: value for state in states[first : first + size] for name, value in state.items()}
        for first in range(0, len(states), size)
    ]


def assert_close(found: State, expected: State, what: str) -> None:
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=f"{what}, {name}")


def assert_equal(found: State, expected: State, what: str) -> None:
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        assert np.array_equal(found[name], value, equal_nan=True), f"{what}, {name}"
