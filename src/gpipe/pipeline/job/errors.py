"""Errors of a step that say where they happened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple


class PipelineError(RuntimeError):
    """A step that could not be finished: no parameter and no moving average was updated.

    Gradients may contain part of the mini-batch: set them to zero before you continue.

    Attributes:
        stage: the stage in which it happened; None if it concerns the whole step.
        micro_batch: the micro-batch that was running; None outside one.
        layer: the index in the whole model of the layer that was running; None outside one.
    """

    def __init__(
        self, message: str, *, stage: int | None = None, micro_batch: int | None = None, layer: int | None = None
    ) -> None:
        super().__init__(message)
        self.stage = stage
        self.micro_batch = micro_batch
        self.layer = layer

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a plain PipelineError if the type was made for a cause: that type exists only in this process."""
        if type(self).__name__ != PipelineError.__name__:
            return _restore, (type(self), self.args, self.__dict__)
        place = {"stage": self.stage, "micro_batch": self.micro_batch, "layer": self.layer}
        return _restore, (PipelineError, self.args, place)

    def __str__(self) -> str:
        """Return the message as it is: some error types, such as KeyError, would quote it."""
        return str(self.args[0]) if self.args else ""


def _restore(kind: type[PipelineError], args: tuple[Any, ...], attributes: dict[str, Any]) -> PipelineError:
    found = kind.__new__(kind, *args)
    found.args = args
    found.__dict__.update(attributes)
    return found


def caused_by(error: Exception, message: str, **place: int | None) -> PipelineError:
    """Return a PipelineError that `except` also catches by the type of its cause, and that has the cause's attributes.

    Args:
        error: the cause.
        message: says what happened, and where.
        place: stage, micro_batch and layer.
    """
    try:
        stated = _type_under(type(error))(message, **place)  # type: ignore[arg-type]  # classes can be hashed
    except TypeError:  # a class that cannot be extended, or needs other arguments
        return PipelineError(message, **place)
    own = {name: value for name, value in error.__dict__.items() if name != "__notes__"}  # shown with the cause
    stated.__dict__.update(own | stated.__dict__)
    return stated


@cache
def _type_under(kind: type[Exception]) -> type[PipelineError]:
    if issubclass(PipelineError, kind):
        return PipelineError

    def make(cls: type[PipelineError], *args: Any, **_: Any) -> Any:
        return kind.__new__(cls, *args)

    members = {"__new__": make, "__module__": PipelineError.__module__}
    return type(PipelineError.__name__, (PipelineError, kind), members)


class NonFiniteError(PipelineError):
    """The mini-batch's loss or the gradients' norm is not a finite number: nothing was updated.

    Attributes:
        what: the message without its remedy.
    """

    def __init__(self, what: str, *, stage: int | None = None) -> None:
        remedy = "lower the learning rate, clip the gradients, or look at this mini-batch"
        super().__init__(f"{what}; nothing was updated: {remedy}", stage=stage)
        self.what = what


class StepAbandoned(PipelineError):
    """A process was asked to stop while it compiled: nothing was updated.

    Attributes:
        notes: of all processes, as in a step's report.
    """

    def __init__(self, step: int, notes: list[Any]) -> None:
        super().__init__(f"step {step} was abandoned while its layers were compiled; nothing was updated")
        self.notes = notes


class FirstNonFinite(NamedTuple):
    """An output that is not finite; the smallest of several comes first in the model."""

    layer: int  # its index in the model; for the loss, the number of layers
    replica: int
    micro_batch: int
    stage: int
    name: str  # "layer 3 (Linear)", or "the loss"

    def __str__(self) -> str:
        """Say where it is."""
        return f"{self.name} in stage {self.stage}, micro-batch {self.micro_batch} of replica {self.replica}"


class PeerFailure(PipelineError):
    """Another process of the pipeline failed; the message is the cause that it reported, or what its silence suggests.

    Attributes:
        told: whether another process reported the cause: it has the traceback, and prints it.
    """

    def __init__(self, message: str, *, told: bool = False, **place: int | None) -> None:
        super().__init__(message, **place)
        self.told = told


class LostPeer(RuntimeError):
    """A connection to another process is gone; `Watch.explain` finds out why.

    Attributes:
        ranks: the ranks in the job of those that this process waited for.
    """

    def __init__(self, ranks: Sequence[int], cause: str) -> None:
        super().__init__(cause)
        self.ranks = tuple(ranks)

    @classmethod
    @contextmanager
    def named(cls, ranks: Sequence[int]) -> Iterator[None]:
        """Replace the error that torch raises when a connection is gone by a LostPeer."""
        try:
            yield
        except RuntimeError as error:
            raise cls(ranks, str(error)) from None
