"""Starts of train.py without its imports: forks of a process that has loaded them, each in a session of its own."""

import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.reliability.session import ROOT, left_of
from tests.support.program_server import become

TRAIN = str(ROOT / "train.py")
LONG_SECONDS = 60.0
_ASKED = 1 << (signal.SIGTERM - 1) | 1 << (signal.SIGINT - 1)


class Start:
    """One start of train.py, which things are done to: each so many seconds after the program listens to signals.

    folder: where it starts. deeds: seconds, and what is done to the process of that number. seconds: that it may take.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        deeds: Sequence[tuple[float, Callable[[int], None]]],
        seconds: float,
    ) -> None:
        self.status: int | None = None
        self.said = ""
        self.listened: float | None = None
        self._deeds = list(deeds)
        self._deadline = time.monotonic() + seconds
        self._output, output = os.pipe()  # a file would count for RLIMIT_FSIZE
        os.set_blocking(self._output, False)
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            become(
                TRAIN, [*arguments], str(folder), dict(os.environ), "ignore", ["/dev/null", *[f"/dev/fd/{output}"] * 2]
            )
        os.close(output)

    def look(self) -> None:
        """Read what it says, do what is due, and note its end. Raises AssertionError where it takes too long."""
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        self._read()
        if ended:
            self.status = os.waitstatus_to_exitcode(status)
            os.close(self._output)
        elif time.monotonic() > self._deadline:
            self.kill()
            raise AssertionError(f"it does not end:\n{self.said}")
        elif self.listened is None:
            self.listened = time.monotonic() if _listens(self.pid) else None
        else:
            self._do(time.monotonic() - self.listened)

    def kill(self) -> None:
        """End it, and whatever it has started."""
        for pid in left_of(self.pid):
            os.kill(pid, signal.SIGKILL)
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._output)

    def left(self, seconds: float) -> list[int]:
        """Return the processes of its session that are left so many seconds after its end."""
        deadline = time.monotonic() + seconds
        while (left := left_of(self.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _read(self) -> None:
        with suppress(BlockingIOError):
            self.said += os.read(self._output, 1 << 20).decode(errors="replace")

    def _do(self, seconds: float) -> None:
        while self._deeds and self._deeds[0][0] <= seconds:
            self._deeds.pop(0)[1](self.pid)


def signal_of(number: signal.Signals) -> Callable[[int], None]:
    """Return what sends a signal."""
    return lambda pid: os.kill(pid, number)


def fill_disk(pid: int) -> None:
    """Let a process write no further byte to any file."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def _listens(pid: int) -> bool:
    """Whether a process has taken the signals into its own hands that ask it to stop."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    taken = [int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk", "SigCgt"))]
    return any(mask & _ASKED == _ASKED for mask in taken)
