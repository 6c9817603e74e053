"""Layers whose sequences can be drawn at random: each takes any payload and works on its main tensor, [n, 4, 6, 6]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gpipe
import gpipe._compat.torchvision  # before timm

# isort: split
from timm.layers import DropPath


class OnMain(nn.Module):
    """Applies a module to the main tensor of a payload; the rest passes by."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, payload: Any) -> Any:
        if isinstance(payload, Tensor):
            return self.module(payload)
        if isinstance(payload, tuple):
            return (self.module(payload[0]), *payload[1:])
        return payload | {"main": self.module(payload["main"])}


class Branch(nn.Module):
    """Makes a tuple whose entries are one tensor, beside an integer and a boolean tensor and None."""

    def forward(self, payload: Any) -> Any:
        main, rest = _parts(payload)
        main = main + sum(rest) if rest else main
        count = torch.arange(len(main), device=main.device).view(-1, 1, 1, 1)
        return main, main, {"count": count, "mask": count % 2 == 0, "nothing": None}


class Nest(nn.Module):
    """Makes a dict of lists."""

    def forward(self, payload: Any) -> Any:
        main, rest = _parts(payload)
        return {"main": main, "rest": [main * 0.5, None, *rest]}


class Join(nn.Module):
    """Adds up what a payload holds; two users of one tensor meet here."""

    def forward(self, payload: Any) -> Any:
        main, rest = _parts(payload)
        return main * 0.7 + sum(part * 0.3 for part in rest) if rest else main


class Sometimes(nn.Module):
    """Uses its weight only in some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 1, 1), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if float(x.detach().sum()) > 0 else x


class Unused(nn.Conv2d):
    """Has a parameter that nothing depends on."""

    def __init__(self) -> None:
        super().__init__(4, 4, 1)
        self.unused = nn.Parameter(torch.ones(3))


class Head(nn.Module):
    """Ends every sequence: 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4 * 36, 5)

    def forward(self, payload: Any) -> Tensor:
        main, rest = _parts(payload)
        return self.linear((main + sum(rest) if rest else main).flatten(1))


def frozen(module: nn.Module) -> nn.Module:
    """Return the module with parameters that are not trained."""
    return module.requires_grad_(False)


KINDS = {
    "conv": lambda: OnMain(nn.Conv2d(4, 4, 3, padding=1)),
    "linear": lambda: OnMain(nn.Linear(6, 6)),
    "norm": lambda: OnMain(nn.BatchNorm2d(4)),
    "tanh": lambda: OnMain(nn.Tanh()),
    "dropout": lambda: OnMain(nn.Dropout(0.4)),
    "drop_path": lambda: OnMain(DropPath(0.4)),
    "frozen": lambda: OnMain(frozen(nn.Conv2d(4, 4, 1))),
    "sometimes": lambda: OnMain(Sometimes()),
    "unused": lambda: OnMain(Unused()),
    "channels_last": lambda: OnMain(ChannelsLast()),
    "holes": lambda: OnMain(Holes()),
    "branch": Branch,
    "nest": Nest,
    "join": Join,
}
RANDOM = {"dropout", "drop_path"}
DEPENDS_ON_MICROBATCH = RANDOM | {"norm", "sometimes"}


class ChannelsLast(nn.Module):
    """Changes how a tensor lies in memory, not what it holds."""

    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)


class Holes(nn.Module):
    """Leaves a hole in memory behind each element."""

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(2, -1)[..., ::2]


def build(kinds: Sequence[str], seed: int = 0) -> nn.Sequential:
    """Return the sequence, with a head, and weights that depend on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Sequential(*(KINDS[kind]() for kind in kinds), Head())
    gpipe.convert_batch_norm(layers)
    return layers


def _parts(payload: Any) -> tuple[Tensor, list[Tensor]]:
    """Return the main tensor and every other floating one."""
    if isinstance(payload, Tensor):
        return payload, []
    if isinstance(payload, tuple):
        return payload[0], [part for part in payload[1:] if isinstance(part, Tensor)]
    return payload["main"], [part for part in payload["rest"] if part is not None]
