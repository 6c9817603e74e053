"""torch.autocast around a training step: each weight is converted once, and backward runs outside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from gpipe.pipeline.nothing import NOTHING


@contextmanager
def step_autocast_cache(*, is_kept: bool) -> Iterator[None]:
    """Let autocast convert each weight once in the body, if its cache is enabled.

    The cache is cleared first: its copies may be older than the last update. All micro-batches' graphs then share one
    copy, whose gradients become float32 before they are added up: the bits are those of a copy per micro-batch.

    is_kept: False converts at each use, for weights that exist only while a layer runs.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(enabled and is_kept)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        torch.clear_autocast_cache()


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Run backward outside autocast, as torch requires: its operations remember the types of the forward."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else NOTHING
