"""The processes of R replicas x P devices, and the connections of the one that this is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from gpipe.pipeline.job.errors import LostPeer
from gpipe.pipeline.job.messages import Messenger, Tag
from gpipe.pipeline.job.watch import Watch
from gpipe.pipeline.schedule import name_stages
from gpipe.pipeline.shared.replicas import Replicas
from gpipe.pipeline.shared.tied_parameters import Sharers
from gpipe.pipeline.transfer import LocalTransfer, Transfer
from gpipe.pipeline.wire.streams import Link
from gpipe.pipeline.wire.transfer import ProcessTransfer

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Processes:
    """Connects this process with the others of its pipeline and with the replicas of its stages.

    Every process of the job makes one, in the same order; the mesh holds all of them.

    Args:
        mesh: with the dimensions ("replica", "stage"), or ("stage",) alone.
        num_stages: K.
        stages_per_device: of which each process has so many; stage s is in process s % P of its pipeline.
        device: where this process computes.
        timeout_seconds: how long a process may make no progress before it is named as hanging.

    Raises:
        ValueError: the mesh has other dimensions, or another number of processes.

    Attributes:
        index: of this process in its pipeline.
        stages: of this process, ascending.
        replica: which of the R pipelines it belongs to.
        rank: of this process in the job.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        num_stages: int,
        stages_per_device: int,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
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
        num_devices = num_stages // stages_per_device
        if mesh.mesh.shape[-1] != num_devices:
            raise ValueError(
                f"the mesh has {mesh.mesh.shape[-1]} stages, but {num_stages} partitions need {num_devices} with "
                f"stages_per_device={stages_per_device}; make them equal"
            )
        self._device = device
        self._timeout_seconds = timeout_seconds
        ranks = mesh.mesh.view(-1, num_devices)  # [R, P]
        ((self.replica, self.index),) = (ranks == dist.get_rank()).nonzero().tolist()
        self.stages = tuple(range(self.index, num_stages, num_devices))
        self._num_stages, self._num_devices = num_stages, num_devices
        self._ranks: list[list[int]] = ranks.tolist()
        self._columns = [list(column) for column in zip(*self._ranks, strict=True)]
        self.rank = dist.get_rank()
        name = name_stages(self.stages) if stages_per_device == 1 else f"the process of {name_stages(self.stages)}"
        name += f" of replica {self.replica}" if len(self._ranks) > 1 else ""
        self.watch = Watch(_board(), self.rank, self.stage, name, timeout_seconds)
        self.messenger = Messenger(self._my_group(self._ranks, "gloo"), self.watch)

    @property
    def stage(self) -> int | None:
        """The stage of this process, for errors; None where it has several."""
        return self.stages[0] if len(self.stages) == 1 else None

    @property
    def place(self) -> str:
        """What of the job this process is, and what it does, for messages."""
        return f"rank {self.rank}, {name_stages(self.stages)}, {self.watch.activity}"

    def process_of(self, stage: int) -> int:
        """Return which process of the pipeline has a stage."""
        return stage % self._num_devices

    def require_agreement(self, settings: dict[str, Any], replicas: Replicas | None = None) -> None:
        """Compare settings, of JSON's types, with those that the other stages were given, or the other replicas.

        Raises:
            ValueError: on all processes; it names the first difference.
            PipelineError: another process is gone or does not come.
        """
        messenger, kind = (self.messenger, "stage") if replicas is None else (replicas.messenger, "replica")
        try:
            first, *others = messenger.gather(settings)
        except LostPeer as lost:
            raise self.watch.explain(lost) from None
        for number, other in enumerate(others, 1):
            for name, value in first.items():
                if other[name] != value:
                    with suppress(LostPeer):
                        messenger.flush()  # or the others never get to see the difference
                    self.watch.retire()
                    raise ValueError(
                        f"{name} is {value} in {kind} 0 and {other[name]} in {kind} {number}; give every process the "
                        "same"
                    )

    def transfer(self) -> Transfer:
        """Return the connections of this process's stages to their neighbours."""
        if self._num_devices == 1:
            return LocalTransfer([self._device] * self._num_stages)
        boundaries = [self._boundary(before) for before in range(self._num_stages - 1)]
        previous = {after: links for after, links in enumerate(boundaries, 1) if links and after in self.stages}
        following = {before: links for before, links in enumerate(boundaries) if links and before in self.stages}
        return ProcessTransfer(previous, following)

    def replicas(self) -> Replicas | None:
        """Return the replicas of this process, None where there is only one."""
        if len(self._ranks) == 1:
            return None
        messenger = Messenger(self._my_group(self._columns, "gloo"), self.watch)
        return Replicas(self._my_group(self._columns, _BACKENDS[self._device.type]), messenger, self.watch)

    def beside(self, replicas: Replicas) -> Replicas:
        """Return the same replicas with another group, for exchanges that come between those of the first one."""
        return Replicas(self._my_group(self._columns, _BACKENDS[self._device.type]), replicas.messenger, self.watch)

    def sharers(self, circles: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Sharers]:
        """Connect some processes of each pipeline with each other; return the connections that this one is in.

        Args:
            circles: which processes of a pipeline, ascending; the same for each process of the job.
        """
        found = {}
        for circle in circles:
            members = [[row[process] for process in circle] for row in self._ranks]
            group = self._my_group(members, _BACKENDS[self._device.type])
            if group is not None:
                found[circle] = Sharers(group, circle, self._device, self.watch)
        return found

    def _boundary(self, before: int) -> tuple[Link, Link] | None:
        """Return this end of the links between stages `before` and `before + 1`: forward, backward."""
        sender, receiver = self.process_of(before), self.process_of(before + 1)
        pairs = [[row[sender], row[receiver]] for row in self._ranks]
        cuda = self._device.type == "cuda"
        groups = [self._my_group(pairs, "nccl") if cuda else None for _ in ("forward", "backward")]
        if self.index not in (sender, receiver):
            return None
        peer = receiver if self.index == sender else sender
        forward, backward = (
            Link(self.messenger, peer, tag.of_boundary(before), group, self._device)
            for tag, group in zip((Tag.FORWARD, Tag.BACKWARD), groups, strict=True)
        )
        return forward, backward

    def _my_group(self, members: list[list[int]], backend: str) -> Any:
        """Make a group of each list of ranks and return this process's own.

        Every process makes every group, in the same order: torch numbers them as they come.
        """
        timeout = timedelta(seconds=self._timeout_seconds)
        groups = [dist.new_group(ranks, backend=backend, timeout=timeout) for ranks in members]
        for ranks, group in zip(members, groups, strict=True):
            if dist.get_rank() in ranks:
                self.watch.guard(group)
                return group
        return None


def _board() -> Store:
    """Return the store of the job, with keys of its own for each pipeline that the job makes."""
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"gpipe/pipelines of {dist.get_rank()}", 1)  # all processes make them in the same order
    return PrefixStore(f"gpipe/{number}", store)
