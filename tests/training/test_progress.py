"""Plain lines where there is no terminal, a bar where there is one."""

import io

from gpipe.training.progress import Progress, StepStatus


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_line_says_what_is_known() -> None:
    status = StepStatus(12, 0, 1.25, 0.5, 310.0, 412 * 2**20, 0.125)
    assert str(status) == "loss 1.2500  top-1 50.0%  310.0 examples/s  peak 412 MiB  bubble 12.5%"
    assert str(StepStatus(12, 0, 1.25)) == "loss 1.2500"


def test_plain_lines_come_every_so_often_and_at_each_epochs_end() -> None:
    stream, now = io.StringIO(), [0.0]
    with Progress(100, 5, interval_seconds=10.0, stream=stream, clock=lambda: now[0]) as progress:
        for step, seconds in ((1, 3.0), (2, 10.5), (3, 11.0), (4, 21.0)):
            now[0] = seconds
            progress.update(StepStatus(step, 0, 1.0))
        progress.update(StepStatus(5, 0, 1.0), ends_epoch=True)
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[1] for line in lines] == ["step 2/100", "step 4/100", "step 5/100"]
    assert lines[0] == "epoch 1/5  step 2/100  loss 1.0000"


def test_a_terminal_gets_a_bar_and_messages_above_it() -> None:
    stream = Terminal()
    with Progress(10, 1, stream=stream) as progress:
        progress.update(StepStatus(3, 0, 1.0))
        progress.message("saved [here]")
    assert "3/10" in stream.getvalue()
    assert "saved [here]" in stream.getvalue()


def test_other_processes_are_silent() -> None:
    for stream in (io.StringIO(), Terminal()):
        with Progress(10, 1, enabled=False, stream=stream) as progress:
            progress.update(StepStatus(10, 0, 1.0), ends_epoch=True)
            progress.message("saved")
        assert stream.getvalue() == ""
