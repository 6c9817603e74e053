"""Errors of checkpoints, and raising one process's error on all."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from safetensors import SafetensorError

from gpipe.pipeline.engine import Pipeline

T = TypeVar("T")


class CheckpointError(Exception):
    """A checkpoint cannot be written, read, or used for this model; the message says what to do."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not, or is no longer, what was saved; an earlier one may be good."""


def run_on_all(pipeline: Pipeline, work: Callable[[], T]) -> T:
    """Run `work` on every process and return what it returned on this one; if it fails on any, raise on all.

    Raises:
        CheckpointError: the first error of all processes.
    """
    error, found = None, []
    try:
        found.append(work())
    except (CheckpointError, OSError, SafetensorError) as caught:
        error = to_json(caught, pipeline.job.place)
    raise_first(pipeline.job.gather(error))
    return found[0]


def to_json(error: BaseException, place: str) -> dict[str, Any]:
    """Return an error of a process at a place in the form that `raise_first` takes."""
    if isinstance(error, CheckpointError):
        return {"text": str(error), "is_damage": isinstance(error, DamagedCheckpoint)}
    kind = "" if isinstance(error, OSError | SafetensorError) else f"{type(error).__name__}: "
    text = f"{place}: the checkpoint cannot be written or read ({kind}{error}): check the disk and its permissions."
    return {"text": text, "is_damage": False}


def raise_first(errors: Iterable[dict[str, Any] | None]) -> None:
    """Raise the first of the processes' errors, if there is any; damage comes after all other errors."""
    for error in sorted(filter(None, errors), key=lambda error: error["is_damage"]):
        raise (DamagedCheckpoint if error["is_damage"] else CheckpointError)(error["text"])
