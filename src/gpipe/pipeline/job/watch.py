"""Watch the other processes while this one computes or waits: name those that failed, hang or are gone.

All processes have a notice board (`Board`) in the key-value store that torch.distributed started with. There each notes
where it runs, which processes it waits for, how far it is, and what it is doing (`Activity`); the first to fail notes
why. Whoever waits in vain is cut off, and reads there what happened.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from gpipe.pipeline._compat import set_timeout
from gpipe.pipeline.job.board import SILENT_SECONDS, Board
from gpipe.pipeline.job.device_work import DeviceWork
from gpipe.pipeline.job.errors import LostPeer, PeerFailure, PipelineError
from gpipe.pipeline.job.host_memory import allocate_on_host
from gpipe.pipeline.job.sockets import Connection
from gpipe.pipeline.schedule import name_stages

_LOOK_SECONDS = 0.5
_URGENT_LOOK_SECONDS = 0.1  # once something has failed
_GRACE_SECONDS = 0.4  # for a process to learn of a failure by itself before its connections are cut
_EXPLANATION_SECONDS = 2.0  # to find the cause when a process has lost its connections but may not have ended
_JOIN_SECONDS = 5.0  # for threads whose waits have been cut
_STOPPED_SECONDS = 3 * _LOOK_SECONDS  # without a look
_SECOND_NET = 10  # times the time-out: then NCCL itself ends a process, if the watch has not
_LEAST_SECONDS = 3600.0  # of that second net, where another process may take a whole step before its part comes
_LOOKS_PER_TIMEOUT = 8  # a chain of many stages takes long to follow, and need not be followed often
_FAILURE = "failure"
PROBE_TAG = 1 << 16  # of messages that are never sent or received
FOREVER = timedelta(days=365)  # a wait that only the watch ends


class _Wait(NamedTuple):
    ranks: tuple[int, ...]
    since: float
    data_from: tuple[int, ...] = ()  # those among them whose data the GPU waits for


class _Waiting:
    """Lets a watch know which processes this one waits for in a body; a class, for speed: it is around each receive."""

    __slots__ = ("_before", "_ranks", "_watch")

    def __init__(self, watch: Watch, ranks: Sequence[int]) -> None:
        self._watch, self._ranks = watch, ranks

    def __enter__(self) -> None:
        self._before = self._watch.wait
        if self._ranks:
            self._watch.wait = _Wait(tuple(self._ranks), time.monotonic())

    def __exit__(self, *_: object) -> None:
        self._watch.wait = self._before
        self._watch.note_progress()


class Watch:
    """Keeps this process's notes up to date, reads those of the others, and ends waits that are in vain.

    A thread looks for the first cause of failure. So the cause reaches a process that computes for a long time, one
    whose neighbours are busy, and the other replicas. If a process then still waits, its connections are cut.

    The thread also decides that a process hangs: it waits for no other, and has made no progress for longer than
    allowed while this process waited for it. A stage that is only slow makes progress, task by task.

    A process waits for those that its host waits for, and for those whose data its GPU lacks according to the first
    unfinished step of `device_work`. While its own GPU works, it waits for no process.

    Args:
        rank: of this process in the job; all ranks here are ranks in the job.
        name: what messages call this process.
        timeout_seconds: how long a process may make no progress while this one waits for it.

    Attributes:
        wait: which processes the host waits for.
        activity: what this process is doing; once it is gone, the others can read what it last did, up to half a second
            old.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        stages: Sequence[int],
        name: str,
        timeout_seconds: float,
        device_work: DeviceWork,
    ) -> None:
        self._device_work, self._stages = device_work, stages
        self._board, self._rank, self._timeout_seconds = Board(store), rank, timeout_seconds
        self.activity = device_work.activity
        self._num_processes, self._num_known = dist.get_world_size(), 0
        self._progress = 0
        self.wait: _Wait | None = None
        self._looks, self._looked = 0, time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}  # the progress of others, and since when it is unchanged
        self._alive: dict[int, tuple[int, float]] = {}  # how often they have looked, and since when it is unchanged
        self._next_search = 0.0
        self._failure: PeerFailure | None = None
        self._failure_seen = 0.0
        self._groups: list[tuple[dist.ProcessGroup, str]] = []  # with their backends
        self._connections: list[Connection] = []
        self._whole_steps: list[dist.ProcessGroup] = []  # NCCL's, which may wait for another process's whole step
        self._retired: float | None = None
        self._closed = threading.Event()
        name = f"{name} (rank {rank}, process {os.getpid()} on {socket.gethostname()})"
        self._board.write(f"process/{rank}", (self._stage, name, _find_namespace(), os.getpid()))
        self._threads: list[threading.Thread] = []
        for look in (Watch.look, Watch.look_after_board):
            arguments = weakref.ref(self), look, self._closed
            self._threads.append(threading.Thread(target=_look_regularly, args=arguments, daemon=True))
            self._threads[-1].start()

    def guard(self, group: dist.ProcessGroup, *, is_link: bool = False) -> None:
        """Let this process wait in a group as long as it takes: this object ends a wait that is in vain.

        If it does not, NCCL itself ends the wait, and the process with it, after many times the time-out.

        is_link: whether the group is NCCL's for one boundary: its transfers are posted when the data have been computed
            or soon will be. In other groups NCCL's clock, which starts when the host asks, may run for a whole step.
        """
        backend = dist.get_backend(group)
        self._groups.append((group, backend))
        net_seconds = _SECOND_NET * self._timeout_seconds
        if backend == "gloo":
            set_timeout(group, FOREVER)
        elif is_link:
            set_timeout(group, timedelta(seconds=net_seconds))
        else:
            set_timeout(group, timedelta(seconds=max(net_seconds, _LEAST_SECONDS)))
            self._whole_steps.append(group)

    def guard_connection(self, connection: Connection) -> None:
        """Let this process wait on a connection of this host as long as it takes, likewise."""
        self._connections.append(connection)

    def expect_compiling(self) -> None:
        """Let a process wait for another that compiles, however long that takes."""
        for group in self._whole_steps:
            set_timeout(group, FOREVER)

    def waiting_for(self, ranks: Sequence[int]) -> _Waiting:
        """Note that this process waits for others, if any, while the body runs."""
        return _Waiting(self, ranks)

    def note_progress(self) -> None:
        """Note that this process has made progress."""
        self._progress += 1

    def check(self) -> None:
        """Note progress, and raise the cause of failure of another process, if there is one.

        Raises:
            PeerFailure: with that cause.
        """
        self._progress += 1
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the cause of failure of another process, if there is one; for a process that only waits."""
        if self._failure is not None:
            raise self._failure

    def report(self, error: PipelineError) -> None:
        """Tell the other processes why this one stops, unless a cause is already noted."""
        place = {"stage": error.stage, "micro_batch": error.micro_batch, "layer": error.layer}
        self._board.write_first(_FAILURE, {"message": str(error), "told": True, **place})

    def report_own(self, what: str) -> None:
        """Note what went wrong in a thread other than the one that plays the tasks, and what this process is doing."""
        error = PeerFailure(f"{self.place}: {what}", stage=self._stage)
        if self._failure is None:  # this process itself reports it
            self._failure, self._failure_seen = error, time.monotonic()
        self.report(error)

    def explain(self, lost: LostPeer) -> PipelineError:
        """Return the error to raise for a connection that is gone."""
        deadline = time.monotonic() + _EXPLANATION_SECONDS
        while True:
            # In this order: a process that has ended noted its cause before.
            ended = [rank for rank in lost.ranks if self._has_ended(rank)]
            if self._failure is not None:
                return self._failure
            if (failure := self._board.read(_FAILURE)) is not None:
                return PeerFailure(**failure)
            if ended or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        rank = (*ended, *lost.ranks)[0]
        stage, name = self._describe(rank)
        if self._board.read(f"closing/{rank}") is not None:
            text = f"{name} has closed its pipeline; every process must make the same calls to it, and then close it"
            return PeerFailure(text, stage=stage)
        seen = self._last_seen(rank)
        text = f"{name} is gone without a word{seen}: it was killed, ran out of memory, exited, or its host is down"
        return PeerFailure(text, stage=stage)

    @property
    def place(self) -> str:
        """Which process this is and what it is doing: "rank 1, stage 1, between two steps"."""
        return f"rank {self._rank}, {name_stages(self._stages)}, {self.activity}"

    @property
    def _stage(self) -> int | None:
        """This process's stage; None if it has several."""
        return self._stages[0] if len(self._stages) == 1 else None

    def retire(self) -> None:
        """Cut this process's connections, so that nobody waits for it in vain: those of torch soon, the others now.

        A process that reads from such a socket still gets what was sent. Torch's groups may drop that, so they are cut
        once the others have had time to look at the board.
        """
        self._retired = time.monotonic()
        for connection in self._connections:
            connection.cut()

    def note_closing(self) -> None:
        """Note that this process will make no further calls to its pipeline."""
        self._board.write(f"closing/{self._rank}", True)

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        self._groups.clear()
        self._connections.clear()

    def give_up(self) -> None:
        """Wait until the others have learnt why this process stops, cut its connections, and end the threads."""
        if self._retired is not None:
            time.sleep(max(0.0, self._retired + _GRACE_SECONDS - time.monotonic()))
        self._cut()
        self.close()

    def join(self) -> None:
        """Wait until the threads have ended, unless one waits for a store that does not answer."""
        if self._board.silent_seconds < SILENT_SECONDS:
            join_threads(self._threads)

    def look(self) -> bool:
        """Update this process's notes and read those of the others; return whether to look again."""
        now = time.monotonic()
        if self._retired is not None:
            if now - self._retired < _EXPLANATION_SECONDS:
                return True
            self._cut()
            self.close()
            return False
        self._looks += 1
        if now - self._looked > self._stopped_seconds:
            # This process was paused, and perhaps all were: what it saw before tells nothing about the others.
            self._seen.clear()
            self._alive.clear()
        self._looked = now
        if self._num_known < self._num_processes:  # one name per look, in case the board is lost later
            self._num_known += self._board.read(f"process/{self._num_known}") is not None
        wait = self._find_wait()
        others = list(wait.ranks) if wait is not None else []
        data_from = list(wait.data_from) if wait is not None else []
        compiling = self.activity.compiling
        self._progress += compiling is not None  # however long it takes
        progress = self._progress + self._device_work.num_done
        undelivered = self._device_work.find_undelivered()
        state = [self._looks, progress, others, str(self.activity), compiling, data_from, undelivered]
        self._board.write(f"state/{self._rank}", state)
        if self._failure is None and (failure := self._board.read(_FAILURE)) is not None:
            self._failure, self._failure_seen = PeerFailure(**failure), now
        if self._failure is None and wait is not None and now >= self._next_search:
            self._next_search = now + self._timeout_seconds / _LOOKS_PER_TIMEOUT
            if (error := self._find_hanging(wait, now)) is not None:
                self.report(error)
                self._failure, self._failure_seen = error, now
        return self._end_wait(wait or self.wait, now)

    def _find_wait(self) -> _Wait | None:
        """Return which processes this one waits for: its host, or its GPU for their data."""
        wait = self.wait
        try:
            first = self._device_work.find_first()
        except RuntimeError:  # the GPU failed: the thread that waits for it reports that
            return wait
        if first is None:
            return wait
        if not first.ranks:  # the GPU works or hangs, whatever the host waits for
            return None
        ranks, since = (wait.ranks, wait.since) if wait is not None else ((), self._device_work.since)
        return _Wait((*ranks, *first.ranks), since, first.ranks)

    @property
    def pause_seconds(self) -> float:
        """The time until the next look."""
        if self._failure is not None:
            return _URGENT_LOOK_SECONDS
        until_search = self._next_search - time.monotonic()
        return min(until_search, _LOOK_SECONDS) if until_search > 0 else _LOOK_SECONDS

    @property
    def _stopped_seconds(self) -> float:
        """The time without a look after which a process counts as stopped."""
        return max(self._timeout_seconds / 2, _STOPPED_SECONDS)

    def look_after_board(self) -> bool:
        """See whether the board, in a process of one host, still answers; return whether to look again.

        It has its own thread: the other one may be waiting for the board.
        """
        if self._failure is None and self._board.silent_seconds > self._timeout_seconds:
            self._board.give_up()
            waited = f"for {self._timeout_seconds:g} s"
            text = f"the first host, where the processes leave notes for each other, has not answered {waited}: "
            self._failure = PeerFailure(text + "it is down, or the network to it is")
            self._failure_seen = time.monotonic()
        return self._end_wait(self.wait, time.monotonic()) if self._failure is not None else True

    def _end_wait(self, wait: _Wait | None, now: float) -> bool:
        """Cut off a wait that is in vain, after a grace period; return whether to look again."""
        if self._failure is None or wait is None or min(now - self._failure_seen, now - wait.since) < _GRACE_SECONDS:
            return True
        if wait is self.wait or wait.data_from:
            self._cut()
            return False
        return True

    def _find_hanging(self, wait: _Wait, now: float) -> PeerFailure | None:
        """Follow the notes of who waits for whom to the processes that wait for none, and name them if they hang."""
        reached: dict[int, list[int]] = {self._rank: []}
        data_from: dict[int, Sequence[int]] = {self._rank: wait.data_from}
        undelivered = {self._rank: self._device_work.find_undelivered()}
        pending = list(wait.ranks)
        while pending:
            if (rank := pending.pop()) not in reached:
                state = self._board.read(f"state/{rank}") or [-1, -1, [], "", None, [], []]
                looks, progress, others, *_, data_from[rank], undelivered[rank] = state
                _note(self._seen, rank, progress, now)
                _note(self._alive, rank, looks, now)
                # What a stopped process waited for tells nothing.
                is_stopped = now - self._alive[rank][1] > self._stopped_seconds
                reached[rank] = [] if is_stopped else others
                pending += reached[rank]
        del reached[self._rank]
        culprits = sorted(rank for rank, others in reached.items() if not others)
        suspects = culprits or sorted(reached)  # all wait for each other
        since = max(wait.since, *(self._seen[rank][1] for rank in suspects))
        if now - since < self._timeout_seconds * (1 - 1 / _LOOKS_PER_TIMEOUT):
            return None
        if now - since < self._timeout_seconds:
            self._next_search = since + self._timeout_seconds
            return None
        # If a link hangs, many wait for data; but only the data that it should carry are ready and not sent.
        links = [(s, rank) for rank, part in data_from.items() for s in part if rank in undelivered.get(s, [])]
        return self._blame(suspects, deadlock=not culprits, links=links)

    def find_compiling(self) -> str | None:
        """Return what is being compiled in a process that this one waits for, directly or indirectly; or None."""
        wait, seen = self.wait, {self._rank}
        pending = list(wait.ranks) if wait is not None else []
        while pending:
            if (rank := pending.pop()) not in seen:
                seen.add(rank)
                _, _, others, _, compiling, *_ = self._board.read(f"state/{rank}") or [-1, -1, [], "", None]
                if compiling is not None:
                    return str(compiling)
                pending += others
        return None

    def _blame(self, ranks: Sequence[int], *, deadlock: bool, links: Sequence[tuple[int, int]]) -> PeerFailure:
        """Return the error that names processes, or the links (from one rank to another) over which nothing comes."""
        described = [self._describe(rank) for rank in ranks]
        stage, own_name = self._describe(self._rank)
        if deadlock and links:
            return self._blame_links(links)
        if deadlock:
            names = " and ".join(name for _, name in described if name != own_name)
            text = f"{own_name} and {names} wait for each other; every process must make the same calls to the pipeline"
            return PeerFailure(text, stage=stage)
        names = " and ".join(f"{name}{self._last_seen(rank)}" for rank, (_, name) in zip(ranks, described, strict=True))
        verb = "does" if len(ranks) == 1 else "do"
        waited = f"{own_name} waited {self._timeout_seconds:g} s"
        text = f"{names} {verb} not answer: {waited}; see what happens there, or raise timeout_seconds"
        return PeerFailure(text, stage=described[0][0])

    def _blame_links(self, links: Sequence[tuple[int, int]]) -> PeerFailure:
        waited = f"have not arrived for {self._timeout_seconds:g} s"
        # In an exchange each lacks the data of the others, and it is not known whose did not come.
        if exchanging := sorted({rank for source, rank in links if (rank, source) in links}):
            described = [self._describe(rank) for rank in exchanging]
            text = f"data that {' and '.join(name for _, name in described)} exchange {waited}; see the links between"
        else:
            described = [self._describe(rank) for _, rank in links]
            pairs = " and ".join(
                f"from {self._describe(source)[1]} to {self._describe(rank)[1]}" for source, rank in links
            )
            text = f"data that were sent {pairs} {waited}; see the link between"
        return PeerFailure(f"{text} their GPUs, or raise timeout_seconds", stage=described[0][0])

    def _cut(self) -> None:
        """End all waits of this process."""
        for connection in self._connections:
            connection.cut()
        for group, backend in self._groups:
            if backend != "gloo":
                with suppress(RuntimeError):
                    group.abort()
                continue
            for peer in range(group.size()):
                if peer != group.rank():
                    # When a wait times out, Gloo closes the connections of its group; a wait for a peer that is already
                    # gone fails before it begins.
                    with suppress(RuntimeError):
                        part = allocate_on_host(1, dtype=torch.uint8)
                        group.recv([part], peer, PROBE_TAG).wait(timedelta(milliseconds=1))

    def _describe(self, rank: int) -> tuple[int | None, str]:
        unknown = None, f"rank {rank}, which never reported where it runs,"
        stage, name, *_ = self._board.read(f"process/{rank}") or unknown
        return stage, name

    def _has_ended(self, rank: int) -> bool:
        """Return whether a process is known to have ended; for one on another host, this is never known."""
        *_, namespace, pid = self._board.read(f"process/{rank}") or (None, None)
        if namespace is None or namespace != _find_namespace():
            return False
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "XZ"  # dead, but its parent has not collected it yet

    def _last_seen(self, rank: int) -> str:
        """Return what a process was doing when it last wrote its notes, as part of a sentence."""
        state = self._board.read(f"state/{rank}")
        return f" (last seen in {state[3]})" if state else ""


def _find_namespace() -> str | None:
    """Return where a process id is unique: a host, or a container on it; None if that is unknown."""
    link, boot = Path("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id")  # two hosts may have one name
    return f"{boot.read_text().strip()} {link.readlink()}" if link.is_symlink() and boot.is_file() else None


def _note(seen: dict[int, tuple[int, float]], rank: int, value: int, now: float) -> None:
    """Remember a value of another process, and since when it has been unchanged."""
    if seen.get(rank, (None, 0.0))[0] != value:
        seen[rank] = value, now


def _look_regularly(reference: weakref.ref[Watch], look: Callable[[Watch], bool], closed: threading.Event) -> None:
    while (watch := reference()) is not None and look(watch):
        pause_seconds = watch.pause_seconds
        del watch  # do not keep an unused pipeline alive
        if closed.wait(pause_seconds):
            return


def join_threads(threads: Iterable[threading.Thread]) -> None:
    """Wait until threads have ended, for a limited time.

    A thread that still waits inside torch when the interpreter exits would abort the process.
    """
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread in threads:
        if thread is not threading.current_thread():  # the current one may be releasing the pipeline
            thread.join(max(0.0, deadline - time.monotonic()))
