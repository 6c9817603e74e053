"""Work that every process of a pipeline does, or that none has done."""

from collections.abc import Callable, Sequence
from typing import Any

from safetensors import SafetensorError

from gpipe.checkpoint.errors import CheckpointError, DamagedCheckpoint
from gpipe.pipeline.engine import Pipeline


def together(pipeline: Pipeline, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on every process and return what each gave, of JSON's types.

    Where any failed, raises its error on all of them: CheckpointError or DamagedCheckpoint.
    """
    outcome: dict[str, Any]
    try:
        outcome = {"value": work()}
    except (CheckpointError, OSError, SafetensorError) as error:
        outcome = as_json(error, pipeline.job.place)
    outcomes = pipeline.job.gather(outcome)
    raise_first(outcomes)
    return [other["value"] for other in outcomes]


def as_json(error: BaseException, place: str) -> dict[str, Any]:
    """Return an error in the form that `raise_first` takes; place: what of the job this process is, and does."""
    if isinstance(error, CheckpointError):
        return {"error": str(error), "damaged": isinstance(error, DamagedCheckpoint)}
    kind = "" if isinstance(error, OSError | SafetensorError) else f"{type(error).__name__}: "
    text = f"{place}: the checkpoint cannot be written or read ({kind}{error}): check the disk and its permissions."
    return {"error": text, "damaged": False}


def raise_first(outcomes: Sequence[dict[str, Any]]) -> None:
    """Raise the error of the first process that has one, if any has; one that is not damage before one that is."""
    for outcome in sorted(outcomes, key=lambda outcome: outcome.get("damaged", True)):
        if "error" in outcome:
            raise (DamagedCheckpoint if outcome["damaged"] else CheckpointError)(outcome["error"])
