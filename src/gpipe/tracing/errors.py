"""Why a model cannot be recorded, or a submodule only as a whole, and where in its code."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Sequence

import torch
from torch import nn

_TRACING, _TORCH = (file.rpartition("/")[0] + "/" for file in (__file__, torch.__file__))
_OURS = _TRACING, _TRACING.removesuffix("tracing/") + "_compat/"


def is_ours(file: str) -> bool:
    """Return whether a file is part of the code that records models."""
    return file.startswith(_OURS)


def is_of_model(file: str) -> bool:
    """Return whether a file has code of a model, and not of the recording, of torch or of contextlib."""
    return not file.startswith((*_OURS, _TORCH, contextlib.__file__))


class TracingError(ValueError):
    """A model to which no sequence of layers is equivalent, such as one whose operations depend on what it computes."""

    @property
    def reason(self) -> str:
        """The message without the remedy."""
        return str(self).partition("; ")[0]


class Whole(Exception):
    """A submodule must be one operation, because its code cannot be recorded; so must others of its type."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(type(module).__name__)
        self.module = module


class Undecided(Exception):
    """The code does what cannot be recorded, such as asking for a value that is only known when the model runs.

    Args:
        what: what the code does, for the message.
        place: the line that does, if the error is found only later.
    """

    def __init__(self, what: str, place: traceback.FrameSummary | None = None) -> None:
        super().__init__(what)
        self.place = place


_NAME_IT = "name the submodule in which that happens, leaves=['...']"
OF_DECISIONS = f"{_NAME_IT}, or build an nn.Sequential of the model's blocks yourself"
"""What to do about code that cannot be cut into layers."""
_OF_FAILURES = f"check the shapes and types of the example; if the model itself accepts them, {_NAME_IT}"
_OF_NUMBERS = {  # what torch's errors about tensors without values mean
    "DataDependentOutputException": "uses the value of a tensor, as item() does",
    "DynamicOutputShapeException": "makes a tensor whose size depends on values, as x[x > 0] does",
}


def explain(
    model: nn.Module, frames: Sequence[traceback.FrameSummary], what: str, remedy: str = OF_DECISIONS
) -> TracingError:
    """Return an error that says where in the model's code it happened, and what to do."""
    begin = next((i for i, frame in enumerate(frames) if frame.filename.startswith(_OURS)), 0)  # before, who called us
    found = [frame for frame in frames[begin:] if not frame.filename.startswith(_OURS)]
    own = [frame for frame in found if is_of_model(frame.filename)]
    own = own or [frame for frame in found if "/nn/modules/" in frame.filename]  # a model of torch itself
    place = f"{own[-1].filename}, line {own[-1].lineno}" if own else "its forward"
    return TracingError(f"{type(model).__name__} cannot be cut into layers: {place}: {what}; {remedy}")


def explain_failure(model: nn.Module, error: Exception, batch: int) -> TracingError:
    """Return an error that says which line of the model's code failed, or cannot be recorded, on `batch` examples."""
    frames = [*traceback.extract_tb(error.__traceback__)]
    kind, what, remedy = type(error).__name__, str(error), OF_DECISIONS
    if isinstance(error, Undecided):
        frames += [] if error.place is None else [error.place]
    elif kind in _OF_NUMBERS:
        what = _OF_NUMBERS[kind]
    elif "dynamo-optimized function" in what:  # torch.fx says so, without an error of its own
        what = "calls a function compiled by torch.compile, which its layers would not do"
    else:
        first_line, _, _ = what.partition("\n")
        what, remedy = f"{kind}: {first_line.rstrip('.')}, for {batch} examples", _OF_FAILURES
    return explain(model, frames, what + "".join(getattr(error, "__notes__", ())), remedy)
