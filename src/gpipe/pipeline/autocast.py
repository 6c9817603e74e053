"""Autocast, as the user's code around a step has set it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def uncached_autocast() -> Iterator[None]:
    """Make autocast convert a weight anew at each use.

    Its cache would hand a weight that was converted without a graph, in the first forward, to the recomputation, where
    the weight would then get no gradient.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Run backward outside of autocast, as torch asks for: its operations remember the types of the forward."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield
