"""Plain lines where there is no terminal, a bar where there is one."""

import io
import re
from contextlib import closing

import pytest

from gpipe.training.progress import Progress, describe_step

STEP = {"step": 12, "epoch": 0, "loss": 1.25}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_figures_are_those_that_are_known() -> None:
    line = {**STEP, "top1": 0.5, "examples_per_second": 310.0, "peak_memory_bytes": 412 * 2**20, "bubble": 0.125}
    assert describe_step(line) == ["loss 1.2500", "top-1 50.0%", "310.0 examples/s", "peak 412 MiB", "bubble 12.5%"]
    assert describe_step({**STEP, "bubble": None}) == ["loss 1.2500"]


def test_plain_lines_come_every_so_often_and_at_each_epochs_end() -> None:
    stream, now = io.StringIO(), [0.0]
    with closing(Progress(100, 5, interval_seconds=10.0, stream=stream, clock=lambda: now[0])) as progress:
        for step, seconds in ((1, 3.0), (2, 10.5), (3, 11.0), (4, 21.0)):
            now[0] = seconds
            progress.update(STEP | {"step": step})
        progress.update(STEP | {"step": 5}, ends_epoch=True)
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 2/100", "step 4/100", "step 5/100"]
    assert lines[0] == "step 2/100  0:12:15 left  epoch 1/5  loss 1.2500"


def test_the_time_left_follows_from_the_steps_after_the_sessions_first() -> None:
    stream, now = io.StringIO(), [0.0]
    with closing(Progress(10_000, 1, stream=stream, clock=lambda: now[0])) as progress:
        for step, seconds in ((501, 900.0), (502, 910.0), (503, 950.0)):  # a run that was resumed, and compiles first
            now[0] = seconds
            progress.update(STEP | {"step": step}, ends_epoch=True)
    found = [line.split("  ")[1] for line in stream.getvalue().splitlines()]
    assert found == ["-:--:-- left", "26:23:00 left", "65:57:05 left"]  # 9498 steps of 10 s, 9497 of 25 s


@pytest.mark.parametrize(
    ("width", "figures"),
    [
        (40, ""),
        (80, "epoch 2/5  loss 1.2500  top-1 50.0%"),
        (200, "epoch 2/5  loss 1.2500  top-1 50.0%  310.0 images/s"),
    ],
)
def test_a_terminal_has_the_bar_the_step_and_the_time_left_then_whole_figures_as_they_fit(
    width: int, figures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    stream, now = Terminal(), [0.0]
    with closing(Progress(1000, 5, stream=stream, clock=lambda: now[0])) as progress:
        for step in (411, 412):
            now[0] += 2.0
            progress.update(
                {"step": step, "epoch": 1, "loss": 1.25, "top1": 0.5, "examples_per_second": 310.0}, examples="images"
            )
    last = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).strip())[-1]
    bar, done, left, of_left, *rest = last.split()
    assert (set(bar) <= set("━╸╺"), done, left, of_left) == (True, "412/1000", "0:19:36", "left")
    assert "  ".join(rest).replace("  ", " ") == figures.replace("  ", " ")


def test_messages_stand_above_the_bar() -> None:
    stream = Terminal()
    with closing(Progress(10, 1, stream=stream)) as progress:
        progress.update(STEP | {"step": 3})
        progress.message("saved [here]")
    assert "3/10" in stream.getvalue()
    assert "saved [here]" in stream.getvalue()


def test_what_makes_a_step_long_is_told_at_intervals_and_beside_the_bar() -> None:
    stream, terminal, now, told = io.StringIO(), Terminal(), [0.0], [None, "compiling layer 3 of 9"]
    for each in (stream, terminal):
        with closing(Progress(100, 1, stream=each, clock=lambda: now[0], under_way=lambda: told[-1])) as progress:
            for seconds in (1.0, 11.0, 12.0, 22.0):
                now[0] = seconds
                progress.show_under_way()
        now[0] = 0.0
    assert set(stream.getvalue().splitlines()) == {"step 0/100  compiling layer 3 of 9"}
    assert "compiling layer 3 of 9" in terminal.getvalue()


def test_other_processes_are_silent() -> None:
    for stream in (io.StringIO(), Terminal()):
        with closing(Progress(10, 1, enabled=False, stream=stream)) as progress:
            progress.update(STEP | {"step": 10}, ends_epoch=True)
            progress.message("saved")
        assert stream.getvalue() == ""


class Failing(io.StringIO):
    """A stream on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


class FailingTerminal(Failing, Terminal):
    """A terminal that is gone."""


@pytest.mark.parametrize("kind", [Failing, FailingTerminal])
def test_what_cannot_be_shown_is_a_warning(kind: type[Failing], capsys: pytest.CaptureFixture[str]) -> None:
    with closing(Progress(10, 1, stream=kind())) as progress:
        for step in range(3):
            progress.update(STEP | {"step": step}, ends_epoch=True)
            progress.message("saved")
    assert capsys.readouterr().err == (
        "warning: the progress cannot be shown (OSError: [Errno 28] No space left on device): the run "
        "continues without it.\n"
    )
