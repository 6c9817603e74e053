"""Let the processes that torchrun starts be forks of it, instead of new Pythons: each would load torch again.

All else is as torchrun has it: a session, an environment and a rendezvous of their own, and signals between them.
"""

import os
import signal
import subprocess
import time
import warnings
from pathlib import Path

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from tests.support.forked_server import forget_the_program
from tests.support.program_server import become


def fork_workers_from_here() -> None:
    """From now on, torchrun in this process forks its workers; it must have loaded what they need."""
    SubprocessHandler._popen = _fork_worker


def _fork_worker(handler: SubprocessHandler, words: tuple[str, ...], environment: dict[str, str]) -> "_Worker":
    _, _, script, *arguments = words  # after the interpreter and its -u
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has threads
        pid = os.fork()
    if pid == 0:
        os.setsid()
        forget_the_program()
        _close_connections()
        become(
            script,
            arguments,
            str(Path.cwd()),
            environment,
            "default",
            ["/dev/null", "/proc/self/fd/1", "/proc/self/fd/2"],
        )
    return _Worker(pid)


def _close_connections() -> None:
    """Close torchrun's, such as the one that it listens at.

    Their numbers stay taken: whatever of torchrun's still has one may close it later, and must not hit another.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, path in [(int(path.name), path) for path in Path("/proc/self/fd").iterdir()]:
        if path.is_socket():
            os.dup2(nothing, number)


class _Worker:
    """What torchrun asks of the Popen of a worker."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.02)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
