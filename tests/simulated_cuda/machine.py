"""A machine with GPUs, simulated or real, on which tests run functions in processes of their own."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from tests.simulated_cuda.mutants import Mutant, apply, compile_watched, reached, watch
from tests.support.program_server import SANITIZER, start_function

SIMULATION = "tests.simulated_cuda.runtime"
"""The module that is there where this very process has simulated GPUs."""
_LOOK_SECONDS = 0.5  # between two looks at processes that may have been stopped


class Answer(NamedTuple):
    """What became of a call in one process."""

    value: Any = None
    error: str = "it never returned"  # a traceback; empty where the call returned
    faults: tuple[str, ...] = ()  # that the simulation noticed
    reached: frozenset[tuple[str, int]] = frozenset()  # the places of changes in modules that were watched


class _Call(NamedTuple):
    number: int
    num_processes: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    mutant: Mutant | None
    watched: frozenset[str]


class Machine:
    """A process that has loaded what takes seconds and, for simulated GPUs, the simulation; each call is a fork of it.

    A function is called as function(rank, *args) and must be importable by name. Several processes are a Gloo group; on
    real GPUs, each has its own.
    """

    def __init__(self, *, simulated: bool) -> None:
        from gpipe.launch.store import LOOPBACK, serve_store

        self.simulated = simulated
        self._store = serve_store(LOOPBACK)
        self._num_calls = 0
        if simulated or SIMULATION in sys.modules:
            self._pipe = start_function(_serve, simulated, self._store.port, gpus=True)
            return
        context = multiprocessing.get_context("spawn")  # no fork may find CUDA started
        self._pipe, theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs, simulated, self._store.port)).start()
        theirs.close()

    def run(self, num_processes: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what each process's call returned, by rank; fail if one raised, or if the simulation found a fault."""
        answers = self.attempt(num_processes, function, *args)
        found = [f"rank {rank}: {answer.error}" for rank, answer in enumerate(answers) if answer.error]
        found += [f"rank {rank}: {fault}" for rank, answer in enumerate(answers) for fault in answer.faults]
        assert not found, "\n".join(found)
        return [answer.value for answer in answers]

    def attempt(
        self,
        num_processes: int,
        function: Callable[..., Any],
        *args: Any,
        mutant: Mutant | None = None,
        seconds: float = 60,
        watched: frozenset[str] = frozenset(),
    ) -> list[Answer]:
        """Return what became of each process's call after at most some seconds, by rank.

        mutant: what to change in the code under test; all ends at the first error or fault, which is enough to notice.
        watched: modules; which places of possible changes in them are come by is noted.
        """
        return self._answer([_Call(self._number(), num_processes, function, args, mutant, watched)], seconds)[0]

    def attempt_at_once(
        self,
        each: Iterable[tuple[int, Callable[..., Any], tuple[Any, ...]]],
        *,
        mutant: Mutant | None = None,
        seconds: float,
    ) -> list[list[Answer]]:
        """Return what `attempt` does for each (number of processes, function, arguments), which all run at once."""
        return self._answer([_Call(self._number(), *one, mutant, frozenset()) for one in each], seconds)

    def _number(self) -> int:
        self._num_calls += 1
        return self._num_calls

    def _answer(self, calls: list[_Call], seconds: float) -> list[list[Answer]]:
        self._pipe.send((calls, seconds))
        answers: list[list[Answer]] = self._pipe.recv()
        return answers

    def close(self) -> None:
        """Let the process end."""
        self._pipe.close()


def _serve(pipe: Connection, simulated: bool, port: int) -> None:
    """Be the process that all calls are forks of."""
    gc.set_threshold(50_000, 20, 20)  # a collection finds what is loaded alive, each time
    sanitizer = os.environ.pop(SANITIZER, None)  # it starts CUDA, which no fork may find started
    import torch

    if sanitizer is not None:
        os.environ[SANITIZER] = sanitizer  # for the forks

    import gpipe  # noqa: F401
    import tests.support.random_layers  # noqa: F401 - timm
    from gpipe.training.numerics import set_numerics

    torch.set_num_threads(1)
    set_numerics(deterministic=True, float32_matmul_precision="highest")  # bits are compared
    gc.freeze()
    while True:
        try:
            calls, seconds = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(_fork(calls, simulated, port, seconds))


def _fork(calls: list[_Call], simulated: bool, port: int, seconds: float) -> list[list[Answer]]:
    context = multiprocessing.get_context("fork")
    processes, pipes, process_of = [], {}, {}
    for number, call in enumerate(calls):
        for module in call.watched:
            compile_watched(module)  # once for all forks
        for rank in range(call.num_processes):
            ours, theirs = context.Pipe(duplex=False)
            processes.append(context.Process(target=_answer, args=(theirs, rank, call, simulated, port)))
            processes[-1].start()
            theirs.close()
            pipes[ours], process_of[ours] = (number, rank), processes[-1].pid
    answers = [[Answer()] * call.num_processes for call in calls]
    deadline = time.monotonic() + seconds
    while pipes and (remaining := deadline - time.monotonic()) > 0:
        if all(_is_stopped(process_of[pipe]) for pipe in pipes):
            break
        for ready in wait(list(pipes), min(remaining, _LOOK_SECONDS)):
            number, rank = pipes.pop(ready)
            try:
                answers[number][rank] = answer = ready.recv()
            except EOFError:  # it died
                continue
            if calls[number].mutant is not None and (answer.error or answer.faults):
                pipes.clear()
                break
    for process in processes:
        process.kill()
        process.join()
    return answers


def _is_stopped(process: int) -> bool:
    """Return whether a signal stopped a process, which then answers no more."""
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def _answer(pipe: Connection, rank: int, call: _Call, simulated: bool, port: int) -> None:
    """Be one process of a call."""
    import torch
    import torch.distributed as dist

    # A fork's first call makes a new pool of threads, and autograd's threads must not race for that.
    torch.set_num_threads(1)
    if call.num_processes > 1:
        store = dist.PrefixStore(str(call.number), dist.TCPStore("127.0.0.1", port, is_master=False))
        backend = "gloo" if simulated else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=call.num_processes)
    try:
        if SANITIZER in os.environ:
            from torch.cuda._sanitizer import cuda_sanitizer

            if not cuda_sanitizer.enabled:  # as it is where torch was imported at the start of Python
                cuda_sanitizer.enable()
        torch.cuda.set_device(rank % torch.cuda.device_count() if call.num_processes > 1 else 0)
        if call.mutant is not None:
            apply(call.mutant)
            if simulated:
                _end_at_a_fault(pipe)
        watch(call.watched)
        value, error = call.function(rank, *call.args), ""
    except Exception:  # noqa: BLE001 - a test's assertion, or the error that it is about
        value, error = None, traceback.format_exc()
    faults: list[str] = []
    if simulated:
        from tests.simulated_cuda.ledger import faults
    pipe.send(Answer(value, error, tuple(faults), frozenset(reached)))
    time.sleep(3600)  # until it is killed: the others would notice an early exit


def _end_at_a_fault(pipe: Connection) -> None:
    """Answer as soon as the simulation finds a fault, and end this process."""
    from tests.simulated_cuda import ledger

    def end(fault: str) -> None:
        pipe.send(Answer(error="", faults=(fault,)))
        os._exit(0)

    ledger.on_fault = end
