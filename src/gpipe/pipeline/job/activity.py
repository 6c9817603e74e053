"""What a process is doing, in words that any thread may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Activity:
    """What one process is doing: a task of a stage, or what lies between two steps.

    Noting costs an assignment; the words are put together only when somebody asks, from any thread.

    Attributes:
        compiling: the layer that is being compiled, in words; None while none is.
    """

    def __init__(self) -> None:
        self.compiling: str | None = None
        self._task: tuple[Callable[[int, str], str], int, str] | None = None
        self._outside = "between two steps"
        self._beside: str | None = None

    def start(self, describe: Callable[[int, str], str], micro_batch: int, doing: str) -> None:
        """Note a task; `describe`, called with micro-batch and doing, returns the place of an error that is now."""
        self._task = describe, micro_batch, doing

    def stop(self) -> None:
        """Note that the task has finished."""
        self._task = None

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Note what is done in the body, apart from tasks, such as "loading data"; where it fails the note stays."""
        before, self._outside = self._outside, what
        yield
        self._outside = before

    @contextmanager
    def doing_beside(self, what: str) -> Iterator[None]:
        """Note what another thread does in the body, while the pipeline works."""
        self._beside = what
        try:
            yield
        finally:
            self._beside = None

    def __str__(self) -> str:
        """Return it in the words of an error's place."""
        task, beside = self._task, self._beside
        words = task[0](*task[1:]) if task is not None else self._outside
        words = words if beside in (None, words) else f"{words}, while {beside}"
        return words if self.compiling is None else f"{words}, {self.compiling}"
