"""The processes of R replicas x K stages, and the connections of the one that this is."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from gpipe.pipeline.failure import LostPeer
from gpipe.pipeline.link import Link
from gpipe.pipeline.messages import Messenger, Tag
from gpipe.pipeline.process_transfer import ProcessTransfer
from gpipe.pipeline.replicas import Replicas
from gpipe.pipeline.watch import Watch

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Processes:
    """Connects this process with the others of its pipeline and with the replicas of its stage.

    Every process of the job makes one, in the same order; the mesh holds all of them.

    Args:
        mesh: with the dimensions ("replica", "stage"), or ("stage",) alone.
        num_stages: K, which the mesh must have room for.
        device: where this process computes.
        timeout_seconds: how long a process may make no progress before it is named as hanging.

    Raises:
        ValueError: the mesh has other dimensions, or another number of stages.
    """

    def __init__(self, mesh: DeviceMesh, num_stages: int, device: torch.device, timeout_seconds: float) -> None:
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
        if mesh.mesh.shape[-1] != num_stages:
            raise ValueError(
                f"the mesh has {mesh.mesh.shape[-1]} stages and the partitions are {num_stages}; make them equal"
            )
        self._device = device
        self._timeout_seconds = timeout_seconds
        ranks = mesh.mesh.view(-1, mesh.mesh.shape[-1])  # [R, K]
        ((replica, stage),) = (ranks == dist.get_rank()).nonzero().tolist()
        self.stage, self.replica, self.num_stages = int(stage), int(replica), num_stages
        self._ranks: list[list[int]] = ranks.tolist()
        self._columns = [list(column) for column in zip(*self._ranks, strict=True)]
        name = f"stage {stage}" + (f" of replica {replica}" if len(self._ranks) > 1 else "")
        self.watch = Watch(_board(), dist.get_rank(), self.stage, name, timeout_seconds)
        self.messenger = Messenger(self._my_group(self._ranks, "gloo"), self.watch)

    def require_agreement(self, settings: dict[str, Any]) -> None:
        """Compare settings, of JSON's types, with those that the other stages were given.

        Raises:
            ValueError: on all processes; it names the first difference.
            PipelineError: another process is gone or does not come.
        """
        try:
            first, *others = self.messenger.gather(settings)
        except LostPeer as lost:
            raise self.watch.explain(lost) from None
        for stage, other in enumerate(others, 1):
            for name, value in first.items():
                if other[name] != value:
                    self.watch.retire()
                    raise ValueError(
                        f"{name} is {value} in stage 0 and {other[name]} in stage {stage}; give every process the same"
                    )

    def transfer(self) -> ProcessTransfer:
        """Return this stage's connections to its neighbours."""
        boundaries = [self._boundary(before) for before in range(self.num_stages - 1)]
        previous = boundaries[self.stage - 1] if self.stage > 0 else None
        following = boundaries[self.stage] if self.stage < self.num_stages - 1 else None
        return ProcessTransfer(previous, following)

    def replicas(self, layers: nn.ModuleDict) -> Replicas | None:
        """Return the replicas of this stage, None where there is only one."""
        if len(self._ranks) == 1:
            return None
        messenger = Messenger(self._my_group(self._columns, "gloo"), self.watch)
        return Replicas(layers, self._my_group(self._columns, _BACKENDS[self._device.type]), messenger, self.watch)

    def _boundary(self, before: int) -> tuple[Link, Link] | None:
        """Return this end of the links between stages `before` and `before + 1`: forward, backward."""
        pairs = [row[before : before + 2] for row in self._ranks]
        cuda = self._device.type == "cuda"
        groups = [self._my_group(pairs, "nccl") if cuda else None for _ in ("forward", "backward")]
        if self.stage not in (before, before + 1):
            return None
        peer = before if self.stage > before else before + 1
        forward, backward = (
            Link(self.messenger, peer, tag, group, self._device)
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
