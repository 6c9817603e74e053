"""torch's elastic agent, with an eye for how its processes end."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, MultiprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from gpipe.launch.rendezvous import OneHost

_POLL_SECONDS = 0.1
_SHUTDOWN_SECONDS = 3  # for a process that does not end by SIGTERM
_TELLING_SECONDS = 3.5  # for the others to find out what the one that ended was doing, and to say so
_LEAVING_SECONDS = 0.5  # once somebody has said it


@dataclass(frozen=True)
class End:
    """How the first process of a run ended that was to go on: its rank, its process id, and its exit code."""

    rank: int
    pid: int
    exitcode: int

    def __str__(self) -> str:
        """Say it in a sentence without a full stop."""
        how = f"signal {-self.exitcode}" if self.exitcode < 0 else f"exit status {self.exitcode}"
        cause = {0: "something in it exited before the training was over", 1: "what it said stands above, if anything"}
        likely = cause.get(self.exitcode, "it was killed from outside, or ran out of memory")
        return f"process {self.pid} (rank {self.rank}) ended with {how}: {likely}"


class Agent(LocalElasticAgent):
    """Starts the processes, and all of them again, up to `max_restarts` times, where one ends too early.

    torch's own ends the others by SIGTERM as soon as one has failed, before they can tell what that one was doing; it
    waits 30 s for one that is stopped; and it waits for ever for one that has exited with status 0.

    entrypoint: called as entrypoint(*args) in each process. logs: a folder for the agent. error_file: where a process
    that fails says why. on_restart: called with the end and the number of restarts that are left, before each.
    start_method: of multiprocessing.
    """

    def __init__(
        self,
        entrypoint: Callable[..., Any],
        args: tuple[Any, ...],
        num_processes: int,
        max_restarts: int,
        logs: Path,
        error_file: Path,
        on_restart: Callable[[End, int], None],
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
        self._error_file, self._on_restart = error_file, on_restart
        self._children: list[BaseProcess] = []
        self._first_end: tuple[End, float] | None = None

    def train(self) -> dict[int, Any] | End:
        """Start the processes and wait; return what they returned, by rank, or how the first of the last try ended."""
        try:
            with _no_handlers():
                result = self.run()
        finally:
            self._worker_group.spec.rdzv_handler.shutdown()
        if self._first_end is not None:
            return self._first_end[0]
        for rank, failure in result.failures.items():  # of a process that ended between two looks at it
            return End(rank, failure.pid, failure.exitcode)
        return dict(result.return_values)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._error_file.unlink(missing_ok=True)
        before = set(active_children())
        pids: dict[int, Any] = super()._start_workers(worker_group)
        by_pid = {child.pid: child for child in active_children() if child not in before}
        self._children = [by_pid[pids[local_rank]] for local_rank in sorted(pids)]
        self._first_end = None
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look after the processes; where one has ended although nobody told them to, wait a little and end the rest.

        One that is done waits to be told so by torch's agent, which does it when all are done.
        """
        ended = [rank for rank, child in enumerate(self._children) if not child.is_alive()]
        if not ended and self._first_end is None:
            context = self._pcontext
            assert isinstance(context, MultiprocessContext)
            if any(queue.empty() for queue in context._ret_vals.values()):
                return RunResult(state=WorkerState.HEALTHY)  # torch's would end the others of one that ends just now
            result: RunResult = super()._monitor_workers(worker_group)
            return result
        if self._first_end is None:
            first = max(ended, key=lambda rank: self._children[rank].exitcode != 1)
            self._first_end = self._end(first), time.monotonic()
        seconds = _LEAVING_SECONDS if self._error_file.exists() else _TELLING_SECONDS
        if len(ended) < len(self._children) and time.monotonic() - self._first_end[1] < seconds:
            return RunResult(state=WorkerState.HEALTHY)
        for child in self._children:
            child.kill()
        for child in self._children:
            child.join()
        end = self._first_end[0]
        if self._remaining_restarts > 0:
            self._on_restart(end, self._remaining_restarts - 1)
        return RunResult(
            state=WorkerState.FAILED,
            failures={end.rank: ProcessFailure(local_rank=end.rank, pid=end.pid, exitcode=end.exitcode, error_file="")},
        )

    def _end(self, rank: int) -> End:
        child = self._children[rank]
        assert child.pid is not None and child.exitcode is not None
        return End(rank, child.pid, child.exitcode)


@contextmanager
def _no_handlers() -> Iterator[None]:
    """Leave the signals to those who handle them already, and SIGHUP ignored under nohup: torch would handle four."""
    name = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    before = os.environ.get(name)
    os.environ[name] = ""
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
