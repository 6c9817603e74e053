"""Let the processes that torchrun starts be forks of it, instead of new Pythons: each would load torch again.

All else is as torchrun has it: a session, an environment and a rendezvous of their own, and signals between them.
"""

import os
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from tests.support.forked_process import ForkedProcess, fork
from tests.support.program_server import become


def fork_workers_from_here() -> None:
    """From now on, torchrun in this process forks its workers; it must have loaded what they need."""
    SubprocessHandler._popen = _fork_worker


def _fork_worker(handler: SubprocessHandler, words: tuple[str, ...], environment: dict[str, str]) -> ForkedProcess:
    _, _, script, *arguments = words  # after the interpreter and its -u

    def work() -> NoReturn:
        _close_connections()
        files = ["/dev/null", "/proc/self/fd/1", "/proc/self/fd/2"]
        become(script, arguments, str(Path.cwd()), environment, "default", files)

    return fork(work)


def _close_connections() -> None:
    """Close torchrun's, such as the one that it listens at.

    Their numbers stay taken: whatever of torchrun's still has one may close it later, and must not hit another.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, path in [(int(path.name), path) for path in Path("/proc/self/fd").iterdir()]:
        if path.is_socket():
            os.dup2(nothing, number)
