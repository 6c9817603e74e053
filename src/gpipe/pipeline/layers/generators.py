"""The global random generators, which belong to the user: restored after use, and watched."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class HostGenerators:
    """Tells whether anything has drawn from the host's global generators since this object was made."""

    def __init__(self) -> None:
        self._states = _read_host_states()

    def find_drawn(self) -> str | None:
        """Return the name of a generator that was drawn from, or None."""
        now = _read_host_states()
        return next((name for name, state in self._states.items() if not _are_equal(now.get(name), state)), None)


def _are_equal(first: Any, second: Any) -> bool:
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def _read_host_states() -> dict[str, Any]:
    """Return the state of each global generator of the host, by name, as something that can be compared."""
    states: dict[str, Any] = {
        "torch's generator for the CPU": torch.default_generator.get_state(),
        "Python's generator": random.getstate(),
    }
    if (numpy_random := find_numpy_random()) is not None:
        kind, keys, *rest = numpy_random.get_state()
        states["numpy's generator"] = kind, keys.tobytes(), *rest
    return states


@contextmanager
def preserved_generators(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the state of the global generators (torch's for the CPU and `devices`, Python's, numpy's) afterwards."""
    generators = [torch.default_generator]
    generators += [torch.cuda.default_generators[cuda_index(d)] for d in set(devices) if d.type == "cuda"]
    states = [generator.get_state() for generator in generators]
    python_state = random.getstate()
    numpy_random = find_numpy_random()
    numpy_state = None if numpy_random is None else numpy_random.get_state()
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)


def find_numpy_random() -> Any:
    """Return numpy's module of generators if something has imported it: torch does not need numpy."""
    return sys.modules.get("numpy.random")


def cuda_index(device: torch.device) -> int:
    """Return the index of a GPU; a device without one means the current GPU."""
    return torch.cuda.current_device() if device.index is None else device.index
