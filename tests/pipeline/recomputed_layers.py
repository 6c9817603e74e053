"""Layers that remember or draw something, and training with them in each mode of re-materialisation."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import gpipe
import gpipe._compat.torchvision  # before timm and torchvision's models

# isort: split
import timm
from timm.layers import EvoNorm2dB0
from torchvision.models.densenet import _DenseBlock

from tests.support.layer_zoo import LENGTH, SIZE, Averages, Differentiates

MODES = ("always", "except_last", "never")


class Recurrent(nn.Module):
    """An LSTM's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(SIZE, SIZE, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Draws(nn.Module):
    """Draws from the generators that torch does not know."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random() * float(np.random.rand())


class Counts(nn.Module):
    """Counts forwards outside of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += not gpipe.is_recomputing()
        return x * 2


class Checkpointed(nn.Module):
    """Runs a module inside of torch's own checkpointing."""

    def __init__(self, module: nn.Module, *, use_reentrant: bool = False) -> None:
        super().__init__()
        self.module = module
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.module, x, use_reentrant=self.use_reentrant)


class OwnBatchNorm(nn.Module):
    """Normalises by torch's function, which moves averages of its own."""

    is_on = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("averages", torch.stack([torch.zeros(LENGTH), torch.ones(LENGTH)]))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, *self.averages, training=self.training) if self.is_on else x


class MappedBatchNorm(OwnBatchNorm):
    """Does so in torch.func, for each of some averages."""

    def forward(self, x: Tensor) -> Tensor:
        def normalize(mean: Tensor, variance: Tensor) -> Tensor:
            return F.batch_norm(x, mean, variance, training=self.training)

        return torch.vmap(normalize)(*self.averages[:, None])[0] if self.is_on else x


class AsImage(nn.Module):
    """Gives a module for images [n, 4, 2, 3] what is a sequence elsewhere."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.view(-1, LENGTH, 2, 3)).flatten(2)


class Dense(nn.Module):
    """DenseNet's block, with its own checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.block = _DenseBlock(2, LENGTH, 2, 2, 0.0, memory_efficient=True)
        self.narrow = nn.Conv2d(8, LENGTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.block(x))


class OfTimm(nn.Module):
    """A small network of timm, which checkpoints its own stages."""

    def __init__(self) -> None:
        super().__init__()
        self.network = timm.create_model("test_resnet", in_chans=LENGTH, num_classes=LENGTH * SIZE)
        self.network.set_grad_checkpointing()

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.view(-1, LENGTH, 2, 3)).view(-1, LENGTH, SIZE)


STATEFUL: dict[str, Callable[[], nn.Module]] = {
    "instance norm": lambda: nn.InstanceNorm1d(LENGTH, affine=True, track_running_stats=True),
    "EvoNorm": lambda: AsImage(EvoNorm2dB0(LENGTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(SIZE, SIZE)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(SIZE, SIZE)),
    "averages": Averages,
    "batch norm of its own": OwnBatchNorm,
    "averages in a checkpoint": lambda: Checkpointed(Averages()),
    "spectral norm in a checkpoint": lambda: Checkpointed(parametrizations.spectral_norm(nn.Linear(SIZE, SIZE))),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": Recurrent,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(SIZE, SIZE)),
    "autograd.grad": lambda: Differentiates("torch.autograd"),
    "torch.func": lambda: Differentiates("torch.func"),
    "batch norm before autograd.grad": lambda: nn.Sequential(nn.BatchNorm1d(LENGTH), Differentiates("torch.autograd")),
    "Python's and numpy's generators": Draws,
}
NORMS: dict[str, Callable[[], nn.Module]] = {
    "a checkpoint": lambda: Checkpointed(nn.BatchNorm1d(LENGTH)),
    "an old checkpoint": lambda: Checkpointed(
        nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(LENGTH)), use_reentrant=True
    ),
    "DenseNet": lambda: AsImage(Dense()),
    "timm": OfTimm,
}


def build(make: Callable[[], nn.Module]) -> nn.Sequential:
    """Return five layers, of which the second and the fourth are of a kind."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Linear(SIZE, SIZE), make(), nn.Linear(SIZE, SIZE), make(), nn.Sequential(nn.Flatten(), nn.Linear(24, 3))
        )
    gpipe.convert_batch_norm(layers)
    return layers


def batch(num_examples: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_examples, LENGTH, SIZE, generator=generator), torch.arange(num_examples) % 3


def train(make: Callable[[], nn.Module], partitions: list[int], mode: str) -> dict[str, Any]:
    """Train for two steps; return losses, gradients and buffers by name."""
    layers = build(make)
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, partitions, 3, rematerialize=mode)
    found: dict[str, Any] = {f"loss {step}": torch.tensor(pipeline.train_step(batch()).loss) for step in range(2)}
    found |= {f"gradient of {name}": parameter.grad for name, parameter in layers.named_parameters()}
    return found | dict(layers.named_buffers())


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value is expected[name] is None or torch.equal(value, expected[name]), name
