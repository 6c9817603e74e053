"""A fork in the place of a new process: what has loaded torch need not load it again."""

import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from typing import NoReturn

from tests.support.forked_server import forget_the_program


class ForkedProcess:
    """A child of this process, with what a Popen has.

    Attributes:
        pid: of the process.
        returncode: its exit status, or a signal's negative number; None while it runs, as far as is known.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return its exit status, once it has ended.

        Raises:
            subprocess.TimeoutExpired: It runs for longer than so many seconds.
        """
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout)
            time.sleep(0.02)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def fork(work: Callable[[], NoReturn]) -> ForkedProcess:
    """Fork this process, with a session of its own, and let the fork do some work that never returns."""
    # Python drops what a handler raises in functions that modules have registered for forks.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process may have threads
            pid = os.fork()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if pid == 0:
        os.setsid()
        forget_the_program()
        work()
    return ForkedProcess(pid)
