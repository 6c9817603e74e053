"""A random number generator per device: what runs there draws from it, and from no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.simulated_cuda.streams import NUM_DEVICES

default_generators = tuple(torch.Generator().manual_seed(1_000_003 * (index + 1)) for index in range(NUM_DEVICES))


@contextmanager
def drawing_from(device: torch.device) -> Iterator[None]:
    """Let the CPU's kernels in the body draw from a device's generator.

    It gives the CPU's numbers, so that a step on the simulated GPU and one on the CPU can be compared bit by bit.
    """
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(default_generators[device.index].get_state())
    try:
        yield
    finally:
        default_generators[device.index].set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)
