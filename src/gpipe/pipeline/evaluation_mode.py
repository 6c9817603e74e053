"""A module in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module, but: Sequence[nn.Module]) -> Iterator[None]:
    """Put a module and all below it `but` some into evaluation mode, without gradients; then each is as it was."""
    before = [(child, child.training) for child in module.modules()]
    module.eval()
    for child in but:
        child.training = True
    try:
        with torch.no_grad():
            yield
    finally:
        for child, training in before:
            if type(child).train is not nn.Module.train:  # it does something of its own, such as to merge weights
                child.train(training)
        for child, training in before:
            child.training = training
