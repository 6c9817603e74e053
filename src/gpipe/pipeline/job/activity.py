"""What a process is doing, in words that any thread may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident

_BETWEEN = "between two steps"


class Activity:
    """What one process is doing: a task of a stage, or something between two steps.

    Noting costs an assignment; the words are formed only when a thread asks.

    Attributes:
        compiling: the layer that is being compiled, in words; None if none is.
    """

    def __init__(self) -> None:
        self.compiling: str | None = None
        self._tasks: dict[int, tuple[Callable[[int, str], str], int, str]] = {}  # by thread
        self._outside = _BETWEEN
        self._beside: str | None = None

    def start(self, describe: Callable[[int, str], str], micro_batch: int, doing: str) -> None:
        """Note this thread's task; `describe`, called with micro-batch and doing, returns where an error would be."""
        self._tasks[get_ident()] = describe, micro_batch, doing

    def stop(self) -> None:
        """Note that this thread's task has finished."""
        self._tasks.pop(get_ident(), None)

    def clear(self) -> None:
        """Forget the tasks of all threads, after an error."""
        self._tasks.clear()
        self._outside = _BETWEEN

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Note what the body does, apart from tasks, such as "loading data"; if it fails the note stays."""
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
        """Return it in the words that errors use for their place."""
        tasks, beside = list(self._tasks.values()), self._beside
        words = " and ".join(describe(micro_batch, doing) for describe, micro_batch, doing in tasks) or self._outside
        words = words if beside in (None, words) else f"{words}, while {beside}"
        return words if self.compiling is None else f"{words}, {self.compiling}"
