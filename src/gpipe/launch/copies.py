"""New processes as copies of one that has loaded what each of them needs: once, and not once in each."""

import multiprocessing
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver

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
        # It has the environment and the output of now, which are not those of this process's next run.
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
