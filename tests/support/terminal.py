"""A program in a terminal of a given width, as a person sees it."""

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.program_server import Program

ROWS = 24


def in_terminal(
    program: Path,
    *arguments: str,
    folder: Path,
    columns: int = 80,
    on_text: Callable[[str, int], None] = lambda _text, _pid: None,
    seconds: float = 280.0,
) -> tuple[int, str]:
    """Run a program of this repository in a terminal; return its exit status and all that it wrote.

    Args:
        program: a script.
        arguments: its arguments.
        folder: its working folder.
        columns: of the terminal.
        on_text: called with all that was written so far whenever there is more, and with the id of the process.
        seconds: after so many it is killed, and the test fails.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    terminal = Path(os.ttyname(theirs))
    others: dict[str, str | None] = dict.fromkeys(("COLUMNS", "LINES", "NO_COLOR"))
    process = Program(
        program, *arguments, folder=folder, output=terminal, typed=terminal, **others, TERM="xterm-256color"
    )
    written, deadline = b"", time.monotonic() + seconds
    try:
        while (status := process.poll()) is None:
            assert time.monotonic() < deadline, f"it does not end: {written[-2000:]!r}"
            if select.select([ours], [], [], 0.05)[0]:
                written += os.read(ours, 65536)
                on_text(written.decode("utf-8", "replace"), process.pid)
        while select.select([ours], [], [], 0)[0]:
            written += os.read(ours, 65536)
        return status, written.decode("utf-8", "replace")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        os.close(ours)
        os.close(theirs)
