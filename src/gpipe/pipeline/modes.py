"""Training and evaluation mode of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module and all below it into evaluation mode, without gradients; afterwards each is as it was."""
    before = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for child, training in before:
            child.training = training
