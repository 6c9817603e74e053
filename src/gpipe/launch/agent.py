"""torch's elastic agent, which starts the processes of a run, watches how they end, and starts them again."""

import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from inspect import signature
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, MultiprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from gpipe._compat.fork_server import kill_fork_server
from gpipe.launch import stops
from gpipe.launch.rendezvous import OneHost

_POLL_SECONDS = 0.1
_SHUTDOWN_SECONDS = 3  # for a process that ignores SIGTERM
_REPORT_SECONDS = 5.0  # for the others to find out what the process that ended was doing, and to report it
_EXIT_SECONDS = 0.5  # once one has reported it
_MAX_BYTES = 75  # of a folder for sockets: a path has at most 107, of which Python's own names take 32
_IS_PRIVATE = sys.version_info >= (3, 11, 1)  # before, any user of a host could send it a pickle (CVE-2022-42919)


def describe_end(failure: ProcessFailure) -> str:
    """Describe how a process ended, in a sentence without a full stop."""
    how = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit status {failure.exitcode}"
    cause = {0: "something in it exited before the training was over", 1: "its message, if any, is above"}
    likely = cause.get(failure.exitcode, "it was killed from outside, or ran out of memory")
    return f"process {failure.pid} (rank {failure.local_rank}) ended with {how}: {likely}"


class Agent(LocalElasticAgent):
    """Starts the processes, and restarts all of them, up to `max_restarts` times, when one ends too early.

    torch's own agent ends the other processes by SIGTERM as soon as one has failed, before they can report what that
    one was doing. It waits 30 s for a stopped process, and forever for one that has exited with status 0.

    Each process calls entrypoint(*args), and writes the reason to `error_file` if it fails. `logs` is a folder for the
    agent.
    """

    def __init__(
        self,
        entrypoint: Callable[..., Any],
        args: tuple[Any, ...],
        num_processes: int,
        max_restarts: int,
        logs: Path,
        error_file: Path,
        start_method: str,
    ) -> None:
        spec = WorkerSpec(
            role="gpipe",
            local_world_size=num_processes,
            rdzv_handler=OneHost(),
            entrypoint=entrypoint,
            args=args,
            max_restarts=max_restarts,
            monitor_interval=_POLL_SECONDS,
            local_addr="localhost",
        )
        # torch 2.11 has no such setting.
        known = signature(LocalElasticAgent.__init__).parameters
        shutdown: dict[str, Any] = {"shutdown_timeout": _SHUTDOWN_SECONDS} if "shutdown_timeout" in known else {}
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(logs)), start_method=start_method, **shutdown)
        self._error_file = error_file
        self._first_end: tuple[ProcessFailure, float] | None = None

    def train(self) -> dict[int, Any] | ProcessFailure:
        """Start the processes; return what they returned, by rank, or how the first process of a failed try ended."""
        # torch must not handle its four signals: they have handlers already, and nohup ignores SIGHUP.
        with stops.environment_variable("TORCHELASTIC_SIGNALS_TO_HANDLE", ""):
            result = self.run()
        # They are torch's own if a process ended between two polls.
        failures: list[ProcessFailure] = [*result.failures.values()]
        return failures[0] if failures else dict(result.return_values)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._error_file.unlink(missing_ok=True)
        self._first_end = None
        pids: dict[int, Any] = super()._start_workers(worker_group)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Poll the processes; if one has ended too early, wait for the others' reports and kill them.

        A process that is done does not exit by itself: torch's agent tells it to when all are done.
        """
        context = self._pcontext
        assert isinstance(context, MultiprocessContext) and context._pc is not None
        children = context._pc.processes
        ended = [rank for rank, child in enumerate(children) if not child.is_alive()]
        if not ended:
            if any(queue.empty() for queue in context._ret_vals.values()):
                # If a process ended right now, torch's agent would end the others.
                return RunResult(state=WorkerState.HEALTHY)
            result: RunResult = super()._monitor_workers(worker_group)
            return result
        if self._first_end is None:
            first = max(ended, key=lambda rank: children[rank].exitcode != 1)
            failure = ProcessFailure(first, children[first].pid, children[first].exitcode, error_file="")
            self._first_end = failure, time.monotonic()
        failure, since = self._first_end
        seconds = _EXIT_SECONDS if self._error_file.exists() else _REPORT_SECONDS
        if len(ended) < len(children) and time.monotonic() - since < seconds:
            return RunResult(state=WorkerState.HEALTHY)
        for child in children:
            child.kill()
        for child in children:
            child.join()
        if self._remaining_restarts > 0:
            why = "" if failure.exitcode == 1 else f"{describe_end(failure)}; "
            allowed = worker_group.spec.max_restarts
            count = f"{allowed - self._remaining_restarts + 1} of launch.max_restarts={allowed}"
            print(f"warning: {why}all processes start again (restart {count}).", file=sys.stderr, flush=True)
        return RunResult(state=WorkerState.FAILED, failures={failure.local_rank: failure})


@contextmanager
def choose_start_method(modules: Sequence[str]) -> Iterator[str]:
    """Yield the name of multiprocessing's start method to use while the body runs.

    New processes are forked from one that has loaded `modules`. If that is impossible or unsafe (macOS, Python 3.11.0,
    a temporary folder whose path is too long for a socket), each process loads what it needs by itself.
    """
    if sys.platform != "linux" or not _IS_PRIVATE or len(tempfile.gettempdir().encode()) > _MAX_BYTES:
        yield "spawn"
        return
    kill_fork_server()  # the program may have started one, with other modules and another environment
    multiprocessing.set_forkserver_preload(["gpipe.launch.paused_collection", *modules])
    try:
        _await_fork_server()
        yield "forkserver"
    finally:
        kill_fork_server()  # the next run of this process has another environment and another output


def _await_fork_server() -> None:
    """Wait until the fork server has loaded, which takes seconds; exit if asked to stop meanwhile."""
    idle = multiprocessing.get_context("forkserver").Process(daemon=True)

    def start() -> None:
        with suppress(OSError, EOFError):  # asked to stop; or it failed, which the processes will report
            idle.start()

    loading = threading.Thread(target=start, daemon=True)
    loading.start()
    while loading.is_alive():
        loading.join(_POLL_SECONDS)
        stops.exit_before_start(stops.find_reason())
    if idle.pid is not None:
        idle.join()
