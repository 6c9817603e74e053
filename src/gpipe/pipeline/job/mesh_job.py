"""A job of several processes, R replicas x P, on a mesh.

Each row is a pipeline, each column holds copies of the same stages:

    replica 0   process 0   process 1   process 2      <- exchange activations and gradients of boundaries
    replica 1   process 0   process 1   process 2
                    ^ average gradients ^
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gpipe.pipeline._compat import open_store
from gpipe.pipeline.checks.refusals import refuse_different
from gpipe.pipeline.job.devices import Devices, choose_device, choose_devices
from gpipe.pipeline.job.errors import LostPeer, NonFiniteError, PeerFailure, PipelineError
from gpipe.pipeline.job.job import Job
from gpipe.pipeline.job.messages import CONTROL_TAG, Messenger
from gpipe.pipeline.job.watch import Watch
from gpipe.pipeline.schedule import Kind, name_stages
from gpipe.pipeline.shared.peers import Peers
from gpipe.pipeline.shared.replicas import Replicas
from gpipe.pipeline.wire.streams import Link
from gpipe.pipeline.wire.transfer import ProcessTransfer

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_CONNECT_SECONDS = 0.1  # between two looks at the others while NCCL connects


class MeshJob(Job):
    """A job of R replicas x P processes, as one of them sees it.

    Every process of the job makes its own, in the same order.

    Args:
        mesh: of all processes, with the dimensions ("replica", "stage"), or ("stage",) alone.
        placement: the process of each stage in its pipeline.
        timeout_seconds: how long a process may make no progress before it is named as hanging.

    Raises:
        ValueError: the mesh has other dimensions, or another number of processes.
    """

    overlaps = True

    def __init__(
        self, mesh: DeviceMesh, placement: Sequence[int], device: torch.device, timeout_seconds: float
    ) -> None:
        num_devices = max(placement) + 1
        _check_mesh(mesh, num_devices, len(placement) // num_devices)
        ranks = mesh.mesh.view(-1, num_devices)  # [R, P]
        self._rank = dist.get_rank()
        ((replica, self.process),) = (ranks == self._rank).nonzero().tolist()
        self._placement, self._num_processes, self._device = tuple(placement), num_devices, device
        self._rows: list[list[int]] = ranks.tolist()
        self._columns = [list(column) for column in zip(*self._rows, strict=True)]
        own = [stage for stage, process in enumerate(placement) if process == self.process]
        super().__init__(dict.fromkeys(own, device), timeout_seconds)
        stages = name_stages(own)
        name = stages if len(own) == 1 else f"the process of {stages}"
        name += f" of replica {replica}" if len(self._rows) > 1 else ""
        self._watch = Watch(open_store(), self._rank, own, name, timeout_seconds, self.device_work)
        self._messenger = Messenger(self._make_groups(self._rows, "gloo"), self._watch)
        self._replica_messenger: Messenger | None = None

    @property
    def place(self) -> str:
        """Which process this is and what it is doing: "rank 1, stage 1, between two steps"."""
        return self._watch.place

    def process_of(self, stage: int) -> int:
        """Return the index of the process of the pipeline that has a stage."""
        return self._placement[stage]

    @property
    def compiling(self) -> str | None:
        """What is being compiled here, or in a process that this one waits for."""
        return self.activity.compiling or self._watch.find_compiling()

    def connect(self, settings: Callable[[], Mapping[str, Any]], among_replicas: Sequence[str] | None) -> None:
        """Compare settings and types of devices with those of the other processes, then connect with them."""
        own = {"devices": self._device.type, **settings()}
        try:
            self._require_agreement(own, self._messenger, "stage")
            if len(self._rows) > 1:
                self._replica_messenger = Messenger(self._make_groups(self._columns, "gloo"), self._watch)
                compared = own if among_replicas is None else {name: own[name] for name in ("devices", *among_replicas)}
                self._require_agreement(compared, self._replica_messenger, "replica")
            if self._num_processes > 1:
                self._messenger.connect_neighbours()
                self.transfer = self._connect_stages()
            if self._replica_messenger is not None:
                self._replica_messenger.connect_neighbours()
                self.replicas = self.connect_replicas()
        except LostPeer as lost:
            raise self._watch.explain(lost) from None

    def connect_replicas(self) -> Replicas:
        """Return the replicas, connected by a group of their own."""
        if self._replica_messenger is None:
            return self.replicas
        group = self._make_groups(self._columns, _BACKENDS[self._device.type])
        return Peers(group, self._watch, self._device, self.device_work, self._replica_messenger)

    def connect_tied(self, groups: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Peers]:
        """Connect processes of each pipeline with each other; return the connections that this one belongs to."""
        found = {}
        for processes in groups:
            members = [[row[process] for process in processes] for row in self._rows]
            group = self._make_groups(members, _BACKENDS[self._device.type])
            if group is not None:
                found[processes] = Peers(group, self._watch, self._device, self.device_work)
        return found

    def gather(self, value: Any) -> list[Any]:
        """Return the values that the pipeline's processes passed, in the order of their first stages."""
        with self._guard_exchange():
            return self._messenger.gather(value)

    def check(self) -> None:
        """Note progress, and raise the cause of failure of another process, if there is one."""
        self._watch.check()

    def expect_compiling(self) -> None:
        """Let processes wait for each other however long one of them compiles."""
        self._watch.expect_compiling()

    def _raise_failure(self) -> None:
        self._watch.raise_failure()

    def abort(self, error: BaseException) -> BaseException:
        """Drop the unfinished step, and tell the other processes why this one stops; return the error that says so."""
        if isinstance(error, LostPeer):
            error = self._watch.explain(error)
        place = self.place
        super().abort(error)
        if self._failure is not None:
            return error
        if isinstance(error, PipelineError):
            stated = error
            if not isinstance(error, PeerFailure | NonFiniteError):  # a NonFiniteError is the same in all processes
                error.args = (f"rank {self._rank}, {error}",)
        else:
            error.add_note(place)
            what = f"{type(error).__name__}: {error}"
            # After many lines, such as the traceback of a process that loads data, a place above them is overlooked.
            text = f"{what}\n(in {place})" if "\n" in what else f"{place}: {what}"
            stated = PipelineError(text, stage=self.device_work.stage)
        self._failure = str(stated)
        self._watch.report(stated)
        self._watch.retire()
        return error

    def close(self) -> None:
        """Wait until the payloads that were sent have arrived, and end the threads."""
        if self._failure is not None:  # what was sent will no longer be asked for
            self._watch.give_up()
            self.transfer.join()
        else:
            self._watch.note_closing()
            self.transfer.close()
            self._watch.close()
        self._watch.join()
        self._failure = self._failure or "it was closed"

    def _require_agreement(self, settings: Mapping[str, Any], messenger: Messenger, kind: str) -> None:
        found = messenger.gather(settings)
        try:
            refuse_different(found, f"{kind} {{}}")
        except ValueError:
            self._watch.retire()
            raise

    def _connect_stages(self) -> ProcessTransfer:
        """Return the connections of this process's stages with their neighbours: two links per boundary."""
        outgoing: dict[tuple[Kind, int], Link] = {}
        incoming: dict[tuple[Kind, int], Link] = {}
        num_boundaries = len(self._placement) - 1
        forward = [(Kind.FORWARD, stage, stage + 1) for stage in range(num_boundaries)]
        backward = [(Kind.BACKWARD, stage + 1, stage) for stage in range(num_boundaries)]
        for tag, (kind, source, target) in enumerate(forward + backward, CONTROL_TAG + 1):
            sender, receiver = self.process_of(source), self.process_of(target)
            if sender == receiver:
                continue
            pairs = [[row[sender], row[receiver]] for row in self._rows]
            nccl = self._make_groups(pairs, "nccl", is_link=True) if self._device.type == "cuda" else None
            if self.process not in (sender, receiver):
                continue
            sends = self.process == sender
            peer = receiver if sends else sender
            connection = self._messenger.connect(peer, offers=sends) if nccl is None else None
            link = Link(self._messenger, peer, tag, nccl, self._device, self.device_work, connection)
            if sends:
                outgoing[kind, source] = link
            else:
                incoming[kind, target] = link
        return ProcessTransfer(outgoing, incoming, [self._device] * len(self._placement))

    def _make_groups(self, members: list[list[int]], backend: str, *, is_link: bool = False) -> Any:
        """Make a group of each list of ranks and return this process's own.

        Every process makes every group, in the same order, as torch requires: it numbers them.
        """
        device = self._device if backend == "nccl" else None  # connects now, not during the first step

        def make() -> list[Any]:
            return [dist.new_group(ranks, self._timeout, backend, device_id=device) for ranks in members]

        others = sorted({rank for ranks in members if self._rank in ranks for rank in ranks} - {self._rank})
        with self._watch.waiting_for(others):
            try:
                groups = make() if device is None else _await_beside(make, device, self._watch.raise_failure)
            except RuntimeError as error:
                # torch's time-out passed, or a process was lost while Gloo connected; torch does not say which one.
                if isinstance(error, dist.DistStoreError) or "connectFullMesh" in str(error):
                    raise self._watch.explain(LostPeer(others, str(error))) from None
                raise
        for ranks, group in zip(members, groups, strict=True):
            if self._rank in ranks:
                self._watch.guard(group, is_link=is_link)
                return group
        return None


def join_job(
    mesh: DeviceMesh | None,
    devices: Devices,
    layers: nn.Module,
    placement: Sequence[int],
    timeout_seconds: float,
) -> Job:
    """Return the job that this process belongs to; without a mesh, a job of its own.

    placement: the process of each stage, if there are several processes.

    Raises:
        TypeError: `mesh` is not a DeviceMesh.
        ValueError: the devices or the mesh do not fit the number of stages.
    """
    if mesh is None:
        if devices is None:
            _warn_of_others(1 + max(placement), len(placement))
        return Job(choose_devices(devices, layers, len(placement)), timeout_seconds)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is {mesh!r}; give what init_device_mesh(device_type, (R, K), mesh_dim_names=('replica', 'stage')) "
            "returns, or set devices where one process plays all stages"
        )
    return MeshJob(mesh, placement, choose_device(devices, mesh), timeout_seconds)


def _warn_of_others(num_devices: int, num_stages: int) -> None:
    """Warn if one process per device was started, but this one was not told to train with the others."""
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if size == num_devices > 1:
        warnings.warn(
            f"{size} processes were started, but this pipeline has no mesh, so that each of them trains all "
            f"{num_stages} stages by itself; give mesh=init_device_mesh(...), or devices if that is what you want",
            stacklevel=4,
        )


def _await_beside(make: Callable[[], list[Any]], device: torch.device, check: Callable[[], None]) -> list[Any]:
    """Return what another thread makes, whose wait cannot be ended; an error from `check` ends this thread's wait."""
    made: Future[list[Any]] = Future()

    def run() -> None:
        torch.cuda.set_device(device)
        try:
            made.set_result(make())
        except Exception as error:  # noqa: BLE001 - the waiting thread raises it
            made.set_exception(error)

    threading.Thread(target=run, name="gpipe-connects", daemon=True).start()
    while wait([made], _CONNECT_SECONDS).not_done:
        check()
    return made.result()


def _check_mesh(mesh: DeviceMesh, num_devices: int, stages_per_device: int) -> None:
    if mesh.mesh_dim_names not in (("replica", "stage"), ("stage",)):
        raise ValueError(
            f"the mesh has the dimensions {mesh.mesh_dim_names}; it needs ('replica', 'stage'): "
            "init_device_mesh(device_type, (R, K), mesh_dim_names=('replica', 'stage'))"
        )
    if mesh.mesh.numel() != dist.get_world_size():
        raise ValueError(
            f"the mesh holds {mesh.mesh.numel()} of the job's {dist.get_world_size()} processes; start as many as "
            "replicas x stages"
        )
    ranks = mesh.mesh.view(-1, mesh.mesh.shape[-1])
    if any(bool((ranks.diff(dim=dim) < 0).any()) for dim in (0, 1)):
        raise ValueError(
            f"the mesh has the rows {ranks.tolist()}; ranks must ascend in each row and column, as init_device_mesh "
            "gives them"
        )
    if mesh.mesh.shape[-1] != num_devices:
        raise ValueError(
            f"the mesh has {mesh.mesh.shape[-1]} stages, but {num_devices * stages_per_device} partitions need "
            f"{num_devices} with stages_per_device={stages_per_device}; make them equal"
        )
