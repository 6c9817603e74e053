"""New processes as copies of one that has loaded what each of them needs: once, and not once in each."""

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

_MOST_BYTES = 75  # of a folder for sockets: a path has 107 at most, of which Python takes 32 for names of its own
_IS_PRIVATE = sys.version_info >= (3, 11, 1)  # before, all users of a host could send it a pickle (CVE-2022-42919)


@contextmanager
def start_method(modules: Sequence[str]) -> Iterator[str]:
    """Yield torch's name of how processes start while the body runs.

    modules: to load once, beforehand. Where that is not possible or not safe (macOS, Python 3.11.0, a folder for
    temporary files whose path is too long for a socket) each process loads what it needs by itself.
    """
    if sys.platform != "linux" or not _IS_PRIVATE or len(tempfile.gettempdir().encode()) > _MOST_BYTES:
        yield "spawn"
        return
    multiprocessing.set_forkserver_preload(["gpipe.launch.resting", *modules])
    try:
        yield "forkserver"
    finally:
        _end()


def _end() -> None:
    """End the process that was loaded: its environment and its output are not those of this process's next run."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)  # else it waits for what a process that was killed had started
    server._stop()
