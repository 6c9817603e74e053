"""Compute random numbers as a function of integers, so that no generator state has to be remembered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1


def derive_seed(*keys: int) -> int:
    """Return a seed of 32 bits that is a pure function of the keys, in their order.

    Torch's CPU generator reads no more than 32 bits of a seed. The mixing is the finaliser of SplitMix64 (Steele et
    al., OOPSLA 2014), once per key.
    """
    state = 0x9E3779B97F4A7C15
    for key in keys:
        state = (state + (key & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 32


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's global generators that a layer on `device` draws from."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[_index(device)].manual_seed(seed)


@contextmanager
def preserved_generators(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the state of torch's global generators (the CPU's and those of `devices`) after the body."""
    generators = [torch.default_generator]
    generators += [torch.cuda.default_generators[_index(d)] for d in set(devices) if d.type == "cuda"]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
