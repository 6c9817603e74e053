"""Compute random numbers as a function of integers, so that no generator state has to be remembered."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from gpipe.pipeline.structure import has_own_code

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15


def derive_seed(*keys: int, state: int = _START) -> int:
    """Return a seed of 32 bits that is a pure function of the keys, in their order.

    state: what `mix_keys` made of the keys before them.

    Torch's CPU generator reads no more than 32 bits of a seed. The mixing is the finaliser of SplitMix64 (Steele et
    al., OOPSLA 2014), once per key.
    """
    return mix_keys(*keys, state=state) >> 32


def mix_keys(*keys: int, state: int = _START) -> int:
    """Return the state of 64 bits that some keys lead to, for seeds that begin with the same ones."""
    for key in keys:
        state = (state + (key & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_generators(seed: int, device: torch.device, *, host: bool = True, others: bool = True) -> None:
    """Seed the global generators that a layer on `device` draws from: torch's and, unless not wanted, the others.

    Args:
        seed: for all of them.
        device: of the layer.
        host: whether those of the host are seeded too, which all threads share: torch's for the CPU, and the others.
        others: Python's and numpy's. To seed them takes 1 % of a step of small layers.
    """
    if host:
        torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[_index(device)].manual_seed(seed)
    if host and others:
        random.seed(seed)
        if (numpy_random := _numpy_random()) is not None:
            numpy_random.seed(seed)


def can_draw_from_others(module: nn.Module) -> bool:
    """Return whether a module's own code, without that of its submodules, may draw from Python's or numpy's generator.

    Layers of torch, torchvision, timm and our own do not. What a user wrote may: a class, a hook, a forward put on an
    instance.
    """
    return not _is_known(type(module)) or has_own_code(module)  # type: ignore[arg-type]  # classes can be hashed


@cache
def _is_known(kind: type[nn.Module]) -> bool:
    takes_functions = issubclass(kind, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)  # as activations
    homes = {parent.__module__.partition(".")[0] for parent in kind.__mro__}
    return not takes_functions and homes <= {"torch", "torchvision", "timm", "gpipe", "builtins"}


class HostGenerators:
    """Tells whether something drew random numbers from the host's global generators, since this object was made."""

    def __init__(self) -> None:
        self._states = _read_host_states()

    def find_drawn(self) -> str | None:
        """Return the name of a generator that was drawn from, or None."""
        now = _read_host_states()
        return next((name for name, state in self._states.items() if now.get(name) != state), None)


def _read_host_states() -> dict[str, Any]:
    """Return the state of each global generator of the host, by name, as something that can be compared."""
    states: dict[str, Any] = {
        "torch's generator for the CPU": bytes(torch.default_generator.get_state().tolist()),
        "Python's generator": random.getstate(),
    }
    if (numpy_random := _numpy_random()) is not None:
        kind, keys, *rest = numpy_random.get_state()
        states["numpy's generator"] = kind, keys.tobytes(), *rest
    return states


@contextmanager
def preserved_generators(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the state of the global generators (torch's for the CPU and `devices`, Python's, numpy's) afterwards."""
    generators = [torch.default_generator]
    generators += [torch.cuda.default_generators[_index(d)] for d in set(devices) if d.type == "cuda"]
    states = [generator.get_state() for generator in generators]
    python_state = random.getstate()
    numpy_random = _numpy_random()
    numpy_state = None if numpy_random is None else numpy_random.get_state()
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)


def _numpy_random() -> Any:
    """Return numpy's module of generators where something has imported it: torch does not need numpy."""
    return sys.modules.get("numpy.random")


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
