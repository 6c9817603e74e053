"""The progress that a person sees: a bar on a terminal, plain lines in a file or pipe."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


@dataclass(frozen=True)
class StepStatus:
    """The figures of one step.

    Attributes:
        step: the number of finished steps.
        epoch: from 0.
        top1, bubble: fractions.
        examples: what to call the data's examples.
    """

    step: int
    epoch: int
    loss: float
    top1: float | None = None
    examples_per_second: float | None = None
    peak_memory_bytes: int | None = None
    bubble: float | None = None
    examples: str = "examples"

    def __str__(self) -> str:
        """Write the known figures on one line."""
        parts = [f"loss {self.loss:.4f}"]
        if self.top1 is not None:
            parts.append(f"top-1 {self.top1:.1%}")
        if self.examples_per_second is not None:
            parts.append(f"{self.examples_per_second:.1f} {self.examples}/s")
        if self.peak_memory_bytes:
            parts.append(f"peak {self.peak_memory_bytes / 2**20:.0f} MiB")
        if self.bubble is not None:
            parts.append(f"bubble {self.bubble:.1%}")
        return "  ".join(parts)


class Progress:
    """Show the steps of a training, on a terminal as a bar, elsewhere as a line every `interval_seconds`.

    With `enabled` False, as on all processes but one, nothing is written.
    """

    def __init__(
        self,
        num_steps: int,
        num_epochs: int,
        *,
        enabled: bool = True,
        interval_seconds: float = 10.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_steps, self._num_epochs = num_steps, num_epochs
        self._enabled, self._interval_seconds, self._clock = enabled, interval_seconds, clock
        self._console = Console(file=stream or sys.stdout, highlight=False)
        self._last_line = clock()
        self._bar: RichProgress | None = None
        if enabled and self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = RichProgress(*columns, TextColumn("{task.fields[status]}"), console=self._console)
            self._task = self._bar.add_task("training", total=num_steps, status="")
            self._bar.start()

    def update(self, status: StepStatus, *, ends_epoch: bool = False) -> None:
        """Show a finished step; plain lines appear at intervals, and at the end of each epoch."""
        if not self._enabled:
            return
        epoch = f"epoch {status.epoch + 1}/{self._num_epochs}"
        if self._bar is not None:
            self._bar.update(self._task, completed=status.step, description=epoch, status=str(status))
        elif ends_epoch or self._clock() - self._last_line >= self._interval_seconds:
            self.message(f"{epoch}  step {status.step}/{self._num_steps}  {status}")
            self._last_line = self._clock()

    def message(self, text: str) -> None:
        """Write a line, above the bar if there is one."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False)
        else:
            print(text, file=self._console.file, flush=True)

    def close(self) -> None:
        """Remove the bar; later calls do nothing."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._enabled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
