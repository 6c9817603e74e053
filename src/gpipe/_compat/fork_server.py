"""The private parts of Python's fork server; they are the same in Python 3.11 to 3.14.

`multiprocessing` ends its fork server only with the program, and a forked process cannot tell that its parent is gone.
"""

import os
import signal
from multiprocessing import forkserver
from typing import Any

import torch


def kill_fork_server() -> None:
    """Kill the fork server, if there is one; the next process that is started starts another."""
    server: Any = forkserver._forkserver  # noqa: TID251
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)  # otherwise it waits for the children of a killed process
    server._stop()


def exit_with_fork_server(worker: int) -> None:  # noqa: ARG001 - torch passes it
    """Let the system kill this worker when its fork server exits, which happens once the training process is gone.

    Otherwise torch's worker looks for its parent only every five seconds, and not while it decodes, hangs or is
    stopped. The server exits when no process holds a certain pipe open, so this process closes it.
    """
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]  # noqa: TID251
    # Does nothing on systems other than Linux.
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]  # noqa: TID251
