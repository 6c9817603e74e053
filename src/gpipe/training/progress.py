"""Show progress: a bar on a terminal, plain lines in a file or pipe."""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

_BAR_WIDTH = 16
_WATCH_SECONDS = 1.0


class _Fitting:
    """As many whole figures as fit between the bar and the edge of the terminal."""

    def __init__(self, figures: list[str]) -> None:
        self._figures = figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for figure in self._figures:
            longer = f"{line}  {figure}" if line else figure
            if len(longer) > options.max_width:
                break
            line = longer
        yield Text(line, no_wrap=True)


class _FiguresColumn(ProgressColumn):
    def render(self, task: Task) -> _Fitting:
        return _Fitting(task.fields["figures"])


class Progress:
    """Shows the steps of a training: as a bar on a terminal, elsewhere as a line every `interval_seconds`.

        ━━━━━━╺━━━━━━━━━ 412/1000 0:03:20 left epoch 2/5  loss 1.2500  top-1 50.0%

    The time left is estimated from this session's steps except its first, which is slower; it includes evaluations and
    saves. `under_way` returns what makes a step take long, such as "compiling layer 3 of 9", or None. With `enabled`
    False, as on all processes but one, nothing is written. If progress cannot be shown, the run continues without it,
    after one warning on stderr.
    """

    def __init__(
        self,
        num_steps: int,
        num_epochs: int,
        *,
        enabled: bool = True,
        under_way: Callable[[], str | None] | None = None,
        interval_seconds: float = 10.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_steps, self._num_epochs = num_steps, num_epochs
        self._enabled, self._interval_seconds, self._clock = enabled, interval_seconds, clock
        self._console = Console(file=stream or sys.stdout, highlight=False)
        self._last_line = clock()
        self._first: tuple[int, float] | None = None  # the first finished step of the session, and when it was
        self._bar: RichProgress | None = None
        if enabled and self._console.is_terminal:
            self._try(self._start_bar)
        self._under_way, self._position, self._closed = under_way, f"step 0/{num_steps}", threading.Event()
        if self._enabled and under_way is not None:
            threading.Thread(target=self._watch, name="progress", daemon=True).start()

    def _start_bar(self) -> None:
        bar = RichProgress(
            BarColumn(_BAR_WIDTH),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True)),
            _FiguresColumn(table_column=Column(ratio=1, no_wrap=True)),
            console=self._console,
            expand=True,
        )
        self._task = bar.add_task("training", total=self._num_steps, left=_time_left(None), figures=[])
        bar.start()
        self._bar = bar

    def _try(self, show: Callable[..., None], *arguments: Any) -> None:
        """Call `show`; if it fails, for example on a full disk, show nothing from then on."""
        if not self._enabled:
            return
        try:
            show(*arguments)
        except Exception as error:  # noqa: BLE001 - a terminal, a file or a pipe may fail in any way
            self._enabled, self._bar = False, None
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            with suppress(OSError):
                print(
                    f"warning: the progress cannot be shown ({reason}): the run continues without it.",
                    file=sys.stderr,
                    flush=True,
                )

    def _watch(self) -> None:
        while not self._closed.wait(_WATCH_SECONDS):
            self.show_under_way()

    def show_under_way(self) -> None:
        """Show what `under_way` returns, unless it is None: beside the bar, or as a line at intervals."""
        text = self._under_way() if self._under_way is not None else None
        if text is not None:
            self._try(self._show, [text], {})

    def update(self, line: Mapping[str, Any], *, examples: str = "examples", ends_epoch: bool = False) -> None:
        """Show the line that a finished step has in the log; in plain text at intervals, and when it ends an epoch."""
        if self._enabled:
            self._position = f"step {line['step']}/{self._num_steps}"
            figures = [f"epoch {line['epoch'] + 1}/{self._num_epochs}", *describe_step(line, examples)]
            done = {"completed": line["step"], "left": _time_left(self._estimate_seconds(line["step"]))}
            self._try(self._show, figures, done, ends_epoch)

    def _show(self, figures: list[str], done: Mapping[str, Any], at_once: bool = False) -> None:
        """Show figures, and what is done: beside the bar, or as a line, at once or at intervals."""
        if (bar := self._bar) is not None:
            bar.update(self._task, figures=figures, **done)
        elif at_once or self._clock() - self._last_line >= self._interval_seconds:
            left = [done["left"]] if done else []
            self._print("  ".join((self._position, *left, *figures)))
            self._last_line = self._clock()

    def _estimate_seconds(self, step: int) -> float | None:
        """Return the seconds until the last step; None after the first step of a session."""
        now = self._clock()
        if self._first is None:
            self._first = step, now
        first, since = self._first
        return None if step <= first else (now - since) / (step - first) * (self._num_steps - step)

    def message(self, text: str) -> None:
        """Write a line, above the bar if there is one."""
        self._try(self._print, text)

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False)
        else:
            print(text, file=self._console.file, flush=True)

    def close(self) -> None:
        """Remove the bar; later calls do nothing."""
        self._closed.set()
        if (bar := self._bar) is not None:
            self._try(bar.stop)
        self._bar, self._enabled = None, False


def describe_step(line: Mapping[str, Any], examples: str = "examples") -> list[str]:
    """Return the known figures of a step's line in the log, the most important first."""
    describe: dict[str, Callable[[float], str]] = {
        "loss": lambda loss: f"loss {loss:.4f}",
        "top1": lambda share: f"top-1 {share:.1%}",
        "examples_per_second": lambda speed: f"{speed:.1f} {examples}/s",
        "peak_memory_bytes": lambda peak: f"peak {peak / 2**20:.0f} MiB",
        "bubble": lambda share: f"bubble {share:.1%}",
    }
    return [describe[name](line[name]) for name in describe if line.get(name) is not None]


def _time_left(seconds: float | None) -> str:
    if seconds is None:
        return "-:--:-- left"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left"
