"""A program in a terminal of a given width, as a person sees it."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

ROWS = 24


def in_terminal(
    *command: str,
    folder: Path,
    columns: int = 80,
    on_text: Callable[[str, subprocess.Popen[bytes]], None] = lambda _text, _process: None,
    seconds: float = 280.0,
    **variables: str,
) -> tuple[int, str]:
    """Run a Python program of this repository in a terminal; return its exit status and all that it wrote.

    Args:
        command: what follows `python`.
        folder: its working folder.
        columns: of the terminal.
        on_text: called with all that was written so far whenever there is more, and with the process.
        seconds: after so many it is killed, and the test fails.
        variables: added to the environment.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", **variables}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    written, deadline = b"", time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            try:
                more = os.read(ours, 65536)
            except OSError:  # EIO: nobody has the other end any more
                break
            if not more:
                break
            written += more
            on_text(written.decode("utf-8", "replace"), process)
        else:
            raise AssertionError(f"it does not end: {written[-2000:]!r}")
        return process.wait(30), written.decode("utf-8", "replace")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)
