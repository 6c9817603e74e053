"""The end of a training step: what all processes learn together, and whether the gradients count."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from gpipe.pipeline.checks.refusals import refuse_different
from gpipe.pipeline.job.errors import NonFiniteError, StepAbandoned
from gpipe.pipeline.job.job import Job
from gpipe.pipeline.loss import MiniBatchLoss, add_up
from gpipe.pipeline.shared.replicas import Replicas
from gpipe.pipeline.shared.tied_parameters import TiedGradients
from gpipe.pipeline.step_end import gradient_norm


class Gradients:
    """The gradients of this process's layers.

    shared_by: the replicas that each have a shard of every gradient; None: each has whole gradients.
    """

    def __init__(self, layers: nn.ModuleDict, tied: TiedGradients, shared_by: Replicas | None) -> None:
        self._layers, self.tied, self._shared_by = layers, tied, shared_by

    def norms(self) -> list[tuple[str, float]]:
        """Return the name of each parameter and the norm of its whole gradient."""
        norms = gradient_norm.compute_norms(self._named())
        return norms if self._shared_by is None else gradient_norm.join_parts(self._shared_by.gather(norms))

    def read(self) -> tuple[list[tuple[str, float]], dict[str, float]]:
        """Return the norms, and the sums of the bits of tied parameters, by name; wait for the devices only once."""
        if not (bits := self.tied.bits):
            return self.norms(), {}
        found = gradient_norm.compute_norms(self._named(), bits)  # replicas do not shard tied parameters
        return found[: -len(bits)], dict(found[-len(bits) :])

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        return self.tied.deduplicate(gradient_norm.name_parameters(self._layers).items())

    def clip(self, norms: Sequence[Sequence[tuple[str, float]]], max_norm: float, step: int) -> float:
        """Clip the gradients, given the norms of all processes; return the global norm before clipping.

        Raises:
            NonFiniteError: the norm is not finite; nothing was scaled.
        """
        try:
            norm = gradient_norm.global_norm(gradient_norm.sort_by_layer(norms))
        except ValueError as error:
            raise NonFiniteError(f"step {step}: {error}") from None
        gradient_norm.scale_gradients(self._layers.parameters(), max_norm, norm)
        return norm

    def clip_together(self, job: Job, max_norm: float, step: int) -> float:
        """Clip gradients outside a step, with all processes of the job.

        Raises:
            NonFiniteError: as `clip`.
            ValueError: the processes were given different norms.
        """
        parts = job.gather({"given": {"max_norm": max_norm}, "norms": self.norms()})
        refuse_different([part["given"] for part in parts], "process {} of the pipeline")
        refuse_different([{"max_norm": value} for value in job.replicas.gather(max_norm)], "replica {}")
        return self.clip([part["norms"] for part in parts], max_norm, step)

    def drop(self) -> None:
        """Set all gradients to None."""
        for parameter in self._layers.parameters():
            parameter.grad = None


class Conclusion(NamedTuple):
    """The outcome of a training step, the same on every process.

    Attributes:
        totals: the loss, under the name "loss", and the metrics.
        notes: of all processes of the job.
        is_skipped: whether a gradient is not finite, so that the scaler skips the step: no process has gradients.
        gradient_norm: before clipping; None without clipping, or if the step is skipped.
    """

    totals: dict[str, float]
    notes: list[Any]
    is_skipped: bool
    gradient_norm: float | None


def conclude(
    job: Job,
    gradients: Gradients,
    loss: MiniBatchLoss | None,
    given: Mapping[str, Any],
    last_stage: int,
    *,
    note: Callable[[], Any] | None,
    is_abandoned: bool,
) -> Conclusion:
    """Exchange the outcome of the step: the loss and metrics, a gradient that is not finite, and the notes.

    All processes must be `given` the same "step", "scaler.scale" and "max_gradient_norm". To the latter gradients are
    clipped; they are dropped if the scaler skips the step. Only the last stage's process has the `loss`.
    `is_abandoned` tells whether this process was asked to stop while it compiled.

    Raises:
        NonFiniteError: the loss or, without a scaler, a gradient is not finite; on every process.
        StepAbandoned: a process was asked to stop while it compiled; on every process.
        TypeError: the note is not of JSON's types.
        ValueError: the processes were given different values, or copies of a tied parameter differ.
    """
    (norms, bits), max_norm, step = gradients.read(), given["max_gradient_norm"], given["step"]
    own = {
        "given": given,
        "totals": loss.totals() if loss else None,
        "fault": [named for named in norms if not math.isfinite(named[1])][:1],
        "norms": norms if max_norm is not None else [],
        "note": [_take(note), is_abandoned],
        "tied": bits,
    }
    parts = job.gather(own)
    refuse_different([part["given"] for part in parts], "process {} of the pipeline")
    gradients.tied.refuse_parted(part["tied"] for part in parts)
    (share,) = (part["totals"] for part in parts if part["totals"] is not None)
    replicas = job.join_replicas([[share, [part["note"] for part in parts]]])
    noted = [own for _, of_one in replicas for own in of_one]
    notes = [each for each, _ in noted]
    if any(was_abandoned for _, was_abandoned in noted):
        raise StepAbandoned(step, notes)
    totals = add_up([share for share, _ in replicas])
    if not math.isfinite(totals["loss"]):
        what = f"the loss of step {step} is {totals['loss']} in stage {last_stage}"
        raise NonFiniteError(what, stage=last_stage)
    if faults := gradient_norm.sort_by_layer(part["fault"] for part in parts):
        if given["scaler.scale"] is not None:
            gradients.drop()
            return Conclusion(totals, notes, True, None)
        ((name, norm), *_) = faults
        raise NonFiniteError(f"the gradient of {name} in step {step} has the norm {norm}")
    clipped = None if max_norm is None else gradients.clip([part["norms"] for part in parts], max_norm, step)
    return Conclusion(totals, notes, False, clipped)


def _take(note: Callable[[], Any] | None) -> Any:
    """Return what a note says; refuse what cannot reach the other processes, also where there are none."""
    said = None if note is None else note()
    try:
        json.dumps(said)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"note returned {type(said).__name__} ({error}), which cannot be sent to the other processes; return None, "
            "numbers, text, lists or dicts of these"
        ) from None
    return said
