"""What a process is doing right now, for messages about it: another one may have to say it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Described(Protocol):
    """A stage, which knows which of its layers is under way."""

    def describe(self, micro_batch: int, doing: str) -> str:
        """Return the place of an error that would happen now."""


class Activity:
    """What one process is doing: a task of a stage, or what lies between two steps.

    Noting costs an assignment; the words are put together only when somebody asks, from any thread.
    """

    def __init__(self) -> None:
        self._task: tuple[Described, int, str] | None = None
        self._outside = "between two steps"
        self._beside: str | None = None

    def start(self, stage: Described, micro_batch: int, doing: str) -> None:
        """Note that a stage works on a micro-batch; what it does is forward, recompute, backward or evaluation."""
        self._task = stage, micro_batch, doing

    def stop(self) -> None:
        """Note that it has finished."""
        self._task = None

    @contextmanager
    def outside(self, doing: str) -> Iterator[None]:
        """Note what is done in the body, apart from tasks; where the body fails the note stays."""
        before, self._outside = self._outside, doing
        yield
        self._outside = before

    @contextmanager
    def beside(self, doing: str) -> Iterator[None]:
        """Note what another thread does in the body, apart from all that is noted else."""
        self._beside = doing
        try:
            yield
        finally:
            self._beside = None

    def __str__(self) -> str:
        """Return it in the words of an error's place."""
        task, beside = self._task, self._beside
        if task is None:
            words = self._outside
        else:
            stage, micro_batch, doing = task
            words = stage.describe(micro_batch, doing)
        return words if beside in (None, words) else f"{words}, while {beside}"
