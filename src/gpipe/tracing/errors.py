"""Why a model cannot be recorded, or a submodule only as a whole, and where in its code that is."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

import torch
from torch import nn

OURS, TORCHS = (file.rpartition("/")[0] + "/" for file in (__file__, torch.__file__))
"""The folders of this package and of torch: where frames are not the model's code."""


class TracingError(ValueError):
    """A model whose operations depend on what it computes, so that no sequence of layers is equal to it."""

    @property
    def reason(self) -> str:
        """What it says, without the remedy."""
        return str(self).partition("; ")[0]


class Whole(Exception):
    """A submodule must be one operation: what happens inside cannot be recorded. So must others of its type."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(type(module).__name__)
        self.module = module


class Undecided(Exception):
    """The code asks for a value that is only known when the model runs."""


def explain(model: nn.Module, frames: Sequence[traceback.FrameSummary], what: str) -> str:
    """Say where in the model's code it happened, and what to do."""
    begin = next((i for i, frame in enumerate(frames) if frame.filename.startswith(OURS)), 0)  # before, who called us
    found = [frame for frame in frames[begin:] if not frame.filename.startswith(OURS)]
    own = [frame for frame in found if not frame.filename.startswith(TORCHS)]
    own = own or [frame for frame in found if "/nn/modules/" in frame.filename]  # a model of torch itself
    place = f"{own[-1].filename}, line {own[-1].lineno}" if own else "its forward"
    return (
        f"{type(model).__name__} cannot be cut into layers: {place}: {what}; name the submodule in which that happens, "
        "leaves=['...'], or give the model's blocks as an nn.Sequential of your own"
    )
