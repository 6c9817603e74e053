"""Compute seeds as a function of integers, so that no generator state has to be saved."""

from __future__ import annotations

import random
from functools import cache

import torch
from torch import nn

from gpipe.pipeline.layers.generators import cuda_index, find_numpy_random
from gpipe.pipeline.layers.structure import has_own_code

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15


def derive_seed(*keys: int, state: int = _START) -> int:
    """Return a seed of 32 bits that is a pure function of the keys and their order.

    state: what `mix_keys` returned for the keys before these.

    Torch's CPU generator uses only 32 bits of a seed. The mixing is the finaliser of SplitMix64 (Steele et al., OOPSLA
    2014), once per key.
    """
    return mix_keys(*keys, state=state) >> 32


def mix_keys(*keys: int, state: int = _START) -> int:
    """Return the state of 64 bits after these keys, from which seeds that begin with them can be derived."""
    for key in keys:
        state = (state + (key & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_generators(seed: int, gpu: torch.device | None = None, *, host: bool = True, others: bool = True) -> None:
    """Seed the global generators that a layer draws from.

    Args:
        seed: for all of them.
        gpu: that the layer is on; None: it is on the CPU.
        host: whether to seed the host's generators too, which all threads share: torch's for the CPU, and the others.
        others: whether to seed Python's and numpy's among them. That takes 1 % of a step of small layers.
    """
    if host:
        torch.default_generator.manual_seed(seed)
    if gpu is not None:
        torch.cuda.default_generators[cuda_index(gpu)].manual_seed(seed)
    if host and others:
        random.seed(seed)
        if (numpy_random := find_numpy_random()) is not None:
            numpy_random.seed(seed)


def can_draw_from_others(module: nn.Module) -> bool:
    """Return whether a module's own code, without that of its submodules, may draw from Python's or numpy's generator.

    Layers of torch, torchvision, timm and this package do not. A user's code may: a class, a hook, a forward put on an
    instance.
    """
    return not _is_known(type(module)) or has_own_code(module)  # type: ignore[arg-type]  # classes can be hashed


@cache
def _is_known(kind: type[nn.Module]) -> bool:
    takes_functions = issubclass(kind, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)  # as activations
    homes = {parent.__module__.partition(".")[0] for parent in kind.__mro__}
    return not takes_functions and homes <= {"torch", "torchvision", "timm", "gpipe", "builtins"}
