"""Watch the other processes while this one computes or waits: name those that failed, hang or are gone.

All processes have a notice board (`Board`) in the key-value store that torch.distributed started with. There each notes
where it runs and, twice a second, its state; the first to fail notes why. Whoever waits in vain is cut off, and reads
there what happened.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

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


class _Note(NamedTuple):
    """What a process tells the others of itself; all but where it runs changes from look to look."""

    name: str  # in messages
    stage: int | None = None  # None if it has several
    namespace: str | None = None  # in which its id is unique; None if that is unknown
    pid: int = 0
    looks: int = -1  # so far: while this grows, the process is alive
    progress: int = -1  # tasks and waits that its host has finished, and steps of its GPUs
    doing: str = ""  # in words
    compiling: str | None = None  # the layer, in words
    waits_for: Sequence[int] = ()  # ranks
    data_from: Sequence[int] = ()  # those among them whose data its GPU waits for
    undelivered: Sequence[int] = ()  # the ranks for which it has data that are ready and not sent

    @property
    def last_seen(self) -> str:
        """What it was doing when it last looked, as part of a sentence."""
        return f" (last seen in {self.doing})" if self.doing else ""


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
        self._watch.progress += 1


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
        progress: of the host: how many tasks and waits have ended.
        connections: to other processes of this host; they end as the groups' do, and `join` closes them.
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
        self._activity = device_work.activity
        self._stopped_seconds = max(timeout_seconds / 2, _STOPPED_SECONDS)  # without a look: the process is stopped
        self._unknown = list(range(dist.get_world_size()))  # whose notes this process has not read yet
        self.progress = 0
        self.wait: _Wait | None = None
        self._looked = time.monotonic()
        self._seen: dict[tuple[int, str], tuple[int, float]] = {}  # numbers of others, and since when each is the same
        self._next_search = 0.0
        self._failure: dict[str, Any] | None = None  # not an error, whose traceback would hold the pipeline
        self._failure_seen = 0.0
        self._groups: list[tuple[dist.ProcessGroup, str]] = []  # with their backends
        self.connections: list[Connection] = []
        self._whole_steps: list[dist.ProcessGroup] = []  # NCCL's, which may wait for another process's whole step
        self._retired: float | None = None
        self._closed = threading.Event()
        name = f"{name} (rank {rank}, process {os.getpid()} on {socket.gethostname()})"
        self._note = _Note(name, device_work.stage, _find_namespace(), os.getpid())
        self._board.write(f"process/{rank}", self._note)
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
            set_timeout(FOREVER, group)
        elif is_link:
            set_timeout(timedelta(seconds=net_seconds), group)
        else:
            set_timeout(timedelta(seconds=max(net_seconds, _LEAST_SECONDS)), group)
            self._whole_steps.append(group)

    def expect_compiling(self) -> None:
        """Let a process wait for another that compiles, however long that takes."""
        for group in self._whole_steps:
            set_timeout(FOREVER, group)

    def waiting_for(self, ranks: Sequence[int]) -> _Waiting:
        """Note that this process waits for others, if any, while the body runs."""
        return _Waiting(self, ranks)

    def check(self) -> None:
        """Note progress, and raise the cause of failure of another process, if there is one.

        Raises:
            PeerFailure: with that cause.
        """
        self.progress += 1
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the cause of failure of another process, if there is one; for a process that only waits."""
        if self._failure is not None:
            raise PeerFailure(**self._failure)

    def report(self, error: PipelineError) -> None:
        """Note why this process stops; for the others too, unless a cause is already noted."""
        place = {"stage": error.stage, "micro_batch": error.micro_batch, "layer": error.layer}
        failure = {"message": str(error), **place}
        if self._failure is None:
            self._failure, self._failure_seen = failure, time.monotonic()
        self._board.write_first(_FAILURE, {**failure, "told": True})

    def report_own(self, what: str) -> None:
        """Report what went wrong in another thread than that of the tasks, and what this process is doing."""
        self.report(PeerFailure(f"{self.place}: {what}", stage=self._device_work.stage))

    def explain(self, lost: LostPeer) -> PipelineError:
        """Return the error to raise for a connection that is gone."""
        deadline = time.monotonic() + _EXPLANATION_SECONDS
        while True:
            # In this order: a process that has ended noted its cause before.
            ended = [rank for rank in lost.ranks if self._has_ended(rank)]
            if (failure := self._find_failure()) is not None:
                return failure
            if ended or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        rank = (*ended, *lost.ranks)[0]
        note = self._read(rank)
        if self._board.read(f"closing/{rank}") is not None:
            what = "has closed its pipeline; every process must make the same calls to it, and then close it"
        else:
            causes = "it was killed, ran out of memory, exited, or its host is down"
            if self._board.is_given_up:
                causes += "; or it lost another rank, whose message then comes first, as the job's store is gone too"
            what = f"is gone without a word{note.last_seen}: {causes}"
        return PeerFailure(f"{note.name} {what}", stage=note.stage)

    def _find_failure(self) -> PeerFailure | None:
        """Return the cause of failure that is known here, or else the one on the board."""
        if self._failure is None and (failure := self._board.read(_FAILURE)) is not None:
            self._failure, self._failure_seen = failure, time.monotonic()
        return None if self._failure is None else PeerFailure(**self._failure)

    @property
    def place(self) -> str:
        """Which process this is and what it is doing: "rank 1, stage 1, between two steps"."""
        return f"rank {self._rank}, {name_stages(self._stages)}, {self._activity}"

    def retire(self) -> None:
        """Cut this process's connections, so that nobody waits for it in vain: those of torch soon, the others now.

        A process that reads from such a socket still gets what was sent. Torch's groups may drop that, so they are cut
        once the others have had time to look at the board.
        """
        self._retired = time.monotonic()
        for connection in self.connections:
            connection.cut()

    def note_closing(self) -> None:
        """Note that this process will make no further calls to its pipeline."""
        self._board.write(f"closing/{self._rank}", True)

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        self._groups.clear()

    def give_up(self) -> None:
        """Wait until the others have learnt why this process stops, cut its connections, and end the threads."""
        if self._retired is not None:
            time.sleep(max(0.0, self._retired + _GRACE_SECONDS - time.monotonic()))
        self._cut()

    def join(self) -> None:
        """Wait until the threads have ended, unless one waits for a store that does not answer; close the connections.

        What was sent over them can still be received.
        """
        if self._board.silent_seconds < SILENT_SECONDS:
            join_threads(self._threads)
        for connection in self.connections:
            connection.close()

    def look(self) -> None:
        """Update this process's notes, read those of the others, and end a wait that is in vain."""
        now = time.monotonic()
        if self._retired is not None:
            if now - self._retired > _EXPLANATION_SECONDS:
                self._cut()
            return
        if now - self._looked > self._stopped_seconds:
            # This process was paused, and perhaps all were: what it saw before tells nothing about the others.
            self._seen.clear()
        self._looked = now
        if self._unknown and self._board.read(f"process/{self._unknown[0]}") is not None:
            del self._unknown[0]  # one per look, so that its name is known if the board is lost later
        wait = self._find_wait()
        self._write(wait)
        if self._find_failure() is None and wait is not None and now >= self._next_search:
            self._next_search = now + self._timeout_seconds / _LOOKS_PER_TIMEOUT
            if (error := self._find_hanging(wait.since, now)) is not None:
                self.report(error)
        self._end_wait(wait or self.wait)

    def _write(self, wait: _Wait | None) -> None:
        """Bring this process's note up to date."""
        compiling = self._activity.compiling
        self.progress += compiling is not None  # however long it takes
        self._note = self._note._replace(
            looks=self._note.looks + 1,
            progress=self.progress + self._device_work.num_done,
            doing=str(self._activity),
            compiling=compiling,
            waits_for=wait.ranks if wait is not None else (),
            data_from=wait.data_from if wait is not None else (),
            undelivered=self._device_work.find_undelivered(),
        )
        self._board.write(f"process/{self._rank}", self._note)

    def _read(self, rank: int) -> _Note:
        return _Note(*self._board.read(f"process/{rank}") or [f"rank {rank}, which never reported where it runs,"])

    def _find_wait(self) -> _Wait | None:
        """Return which processes this one waits for: its host, or its GPU for their data."""
        wait = self.wait
        try:
            first = self._device_work.find_first()
        except PipelineError:  # the GPU failed: the thread that waits for it reports that
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

    def look_after_board(self) -> None:
        """See whether the board, in a process of one host, still answers.

        It has its own thread: the other one may be waiting for the board.
        """
        if self._failure is None and self._board.silent_seconds > self._timeout_seconds:
            self._board.give_up()
            text = "the first host, where the processes leave notes for each other, has not answered for "
            text += f"{self._timeout_seconds:g} s: it is down, or the network to it is"
            self.report(PeerFailure(text))
        self._end_wait(self.wait)

    def _end_wait(self, wait: _Wait | None) -> None:
        """Cut off a wait that is in vain, after a grace period."""
        if self._failure is None or wait is None:
            return
        begin = max(self._failure_seen, wait.since)
        if time.monotonic() - begin > _GRACE_SECONDS and (wait is self.wait or wait.data_from):
            self._cut()

    def _find_hanging(self, since: float, now: float) -> PeerFailure | None:
        """Follow the notes of who waits for whom to the processes that wait for none, and name them if they hang."""
        own, notes = self._note, self._follow(self._note.waits_for)
        culprits = sorted(rank for rank, note in notes.items() if not note.waits_for)  # none: all wait for each other
        since = max(since, *(self._seen[rank, "progress"][1] for rank in culprits or notes))
        if now - since < self._timeout_seconds:
            self._next_search = min(self._next_search, since + self._timeout_seconds)
            return None
        if culprits:
            names = " and ".join(f"{notes[rank].name}{notes[rank].last_seen}" for rank in culprits)
            verb = "does" if len(culprits) == 1 else "do"
            waited = f"{own.name} waited {self._timeout_seconds:g} s"
            text = f"{names} {verb} not answer: {waited}; see what happens there, or raise timeout_seconds"
            return PeerFailure(text, stage=notes[culprits[0]].stage)
        names = " and ".join([own.name, *(notes[rank].name for rank in sorted(notes))])
        notes[self._rank] = own
        # If a link hangs, many wait for data; but only the data that it should carry are ready and not sent.
        links = [(s, rank) for rank, note in notes.items() for s in note.data_from if rank in notes[s].undelivered]
        if links:
            return self._blame_links(links, notes)
        text = f"{names} wait for each other; every process must make the same calls to the pipeline"
        return PeerFailure(text, stage=own.stage)

    def _follow(self, ranks: Sequence[int]) -> dict[int, _Note]:
        """Return the notes of other processes, by rank: these, and those that they wait for, directly or indirectly."""
        notes: dict[int, _Note] = {}
        pending = list(ranks)
        while pending:
            if (rank := pending.pop()) == self._rank or rank in notes:
                continue
            note = self._read(rank)
            self._find_since(rank, "progress", note.progress)
            if time.monotonic() - self._find_since(rank, "looks", note.looks) > self._stopped_seconds:
                note = note._replace(waits_for=(), data_from=())  # what a stopped process waited for tells nothing
            notes[rank] = note
            pending += note.waits_for
        return notes

    def _find_since(self, rank: int, what: str, value: int) -> float:
        """Return since when a number of another process has been the same, as far as this one has seen."""
        before, since = self._seen.get((rank, what), (None, 0.0))
        since = since if value == before else time.monotonic()
        self._seen[rank, what] = value, since
        return since

    def find_compiling(self) -> str | None:
        """Return what is being compiled in a process that this one waits for, directly or indirectly; or None."""
        wait = self.wait
        notes = self._follow(wait.ranks).values() if wait is not None else ()
        return next((note.compiling for note in notes if note.compiling is not None), None)

    def _blame_links(self, links: Sequence[tuple[int, int]], notes: Mapping[int, _Note]) -> PeerFailure:
        """Return the error that names links, from one rank to another, over which nothing comes."""
        waited = f"have not arrived for {self._timeout_seconds:g} s"
        # In an exchange each lacks the data of the others, and it is not known whose did not come.
        if exchanging := sorted({rank for source, rank in links if (rank, source) in links}):
            names = " and ".join(notes[rank].name for rank in exchanging)
            first, text = exchanging[0], f"data that {names} exchange {waited}; see the links between"
        else:
            pairs = " and ".join(f"from {notes[source].name} to {notes[rank].name}" for source, rank in links)
            first, text = links[0][1], f"data that were sent {pairs} {waited}; see the link between"
        return PeerFailure(f"{text} their GPUs, or raise timeout_seconds", stage=notes[first].stage)

    def _cut(self) -> None:
        """End all waits of this process, and the threads."""
        for connection in self.connections:
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
        self.close()

    def _has_ended(self, rank: int) -> bool:
        """Return whether a process is known to have ended; for one on another host, this is never known."""
        note = self._read(rank)
        if note.namespace is None or note.namespace != self._note.namespace:
            return False
        try:
            state = Path(f"/proc/{note.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "XZ"  # dead, but its parent has not collected it yet


def _find_namespace() -> str | None:
    """Return where a process id is unique: a host, or a container on it; None if that is unknown."""
    link, boot = Path("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id")  # two hosts may have one name
    return f"{boot.read_text().strip()} {link.readlink()}" if link.is_symlink() and boot.is_file() else None


def _look_regularly(reference: weakref.ref[Watch], look: Callable[[Watch], None], closed: threading.Event) -> None:
    pause_seconds = 0.0
    while not closed.wait(pause_seconds) and (watch := reference()) is not None:
        look(watch)
        pause_seconds = watch.pause_seconds
        del watch  # do not keep an unused pipeline alive


def join_threads(threads: Iterable[threading.Thread]) -> None:
    """Wait until threads have ended, for a limited time.

    A thread that still waits inside torch when the interpreter exits would abort the process.
    """
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread in threads:
        if thread is not threading.current_thread():  # the current one may be releasing the pipeline
            thread.join(max(0.0, deadline - time.monotonic()))
