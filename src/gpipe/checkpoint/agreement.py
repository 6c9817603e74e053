"""Work that every process of a pipeline does, or that none has done."""

from collections.abc import Callable
from typing import Any

from safetensors import SafetensorError

from gpipe.checkpoint.manifest import CheckpointError
from gpipe.pipeline.engine import Pipeline


def together(pipeline: Pipeline, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on every process and return what each gave; where any failed, raise its error on all of them."""
    try:
        outcome = {"value": work()}
    except CheckpointError as error:
        outcome = {"error": str(error)}
    except (OSError, SafetensorError) as error:
        outcome = {"error": f"The checkpoint cannot be written or read ({error}): check the disk and its permissions."}
    outcomes = pipeline.gather(outcome)
    for other in outcomes:
        if "error" in other:
            raise CheckpointError(other["error"])
    return [other["value"] for other in outcomes]
