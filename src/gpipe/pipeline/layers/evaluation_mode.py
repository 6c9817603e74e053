"""Evaluation mode for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def evaluation_mode(functions: Sequence[Any], but: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules and all below them, except those in `but`, into evaluation mode without gradients; then restore."""
    modules = [function for function in functions if isinstance(function, nn.Module)]
    before = [(child, child.training) for module in modules for child in module.modules()]
    for module in modules:
        module.eval()
    for child in but:
        child.training = True
    try:
        with torch.no_grad():
            yield
    finally:
        for child, training in before:
            if type(child).train is not nn.Module.train:  # it does more, such as merging weights
                child.train(training)
        for child, training in before:
            child.training = training
