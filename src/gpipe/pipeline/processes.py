"""The processes of R replicas x K stages, and the connections of the one that this is."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gpipe.pipeline.messages import Messenger, Tag
from gpipe.pipeline.peers import Peers
from gpipe.pipeline.process_transfer import Link, ProcessTransfer
from gpipe.pipeline.replicas import Replicas


class Processes:
    """Connects this process with the others of its pipeline and with the replicas of its stage.

    Every process of the mesh must make one, in the same order.

    Args:
        mesh: with the dimensions ("replica", "stage"), or ("stage",) alone.
        num_stages: K, which the mesh must have room for.
        device: where this process computes.
        timeout_seconds: how long a receive waits for a peer before that is named as hanging.

    Raises:
        ValueError: the mesh has other dimensions, or another number of stages.
    """

    def __init__(self, mesh: DeviceMesh, num_stages: int, device: torch.device, timeout_seconds: float) -> None:
        if mesh.mesh_dim_names not in (("replica", "stage"), ("stage",)):
            raise ValueError(
                f"the mesh has the dimensions {mesh.mesh_dim_names}; it needs ('replica', 'stage'): "
                "init_device_mesh(device_type, (R, K), mesh_dim_names=('replica', 'stage'))"
            )
        if mesh.mesh.shape[-1] != num_stages:
            raise ValueError(
                f"the mesh has {mesh.mesh.shape[-1]} stages and the partitions are {num_stages}; make them equal"
            )
        self._mesh = mesh
        self._device = device
        self._timeout_seconds = timeout_seconds
        ranks = mesh.mesh.view(-1, mesh.mesh.shape[-1])  # [R, K]
        ((replica, stage),) = (ranks == dist.get_rank()).nonzero().tolist()
        self.stage, self.replica, self.num_stages = int(stage), int(replica), num_stages
        self._row: list[int] = ranks[replica].tolist()
        self._column: list[int] = ranks[:, stage].tolist()
        self.messenger = self._new_messenger(self._row)
        # Only members of a group take part in making it, so its name is the same to all of them and to nobody else.
        store = dist.PrefixStore(f"gpipe/{self.messenger.group.group_name}", dist.distributed_c10d._get_default_store())
        self.peers = Peers(store, self.stage, timeout_seconds)

    def transfer(self) -> ProcessTransfer:
        """Return this stage's connections to its neighbours."""
        previous = following = None
        if self.stage > 0:
            forward, backward = self._boundary(self.stage - 1)
            previous = forward, backward
        if self.stage < self.num_stages - 1:
            forward, backward = self._boundary(self.stage)
            following = forward, backward
        return ProcessTransfer(previous, following)

    def replicas(self, layers: nn.ModuleDict) -> Replicas | None:
        """Return the replicas of this stage, None where there is only one."""
        if len(self._column) == 1:
            return None
        return Replicas(layers, self._mesh.get_group("replica"), self._new_messenger(self._column))

    def _boundary(self, before: int) -> tuple[Link, Link]:
        """Return this end of the links between stages `before` and `before + 1`: forward, backward."""
        peer = before if self.stage > before else before + 1
        links = []
        for header, data in ((Tag.FORWARD_HEADER, Tag.FORWARD_DATA), (Tag.BACKWARD_HEADER, Tag.BACKWARD_DATA)):
            pair = self._row[before : before + 2]
            nccl = self._new_group(pair, "nccl") if self._device.type == "cuda" else None
            links.append(Link(self.messenger, peer, header, data, nccl, self._device))
        return links[0], links[1]

    def _new_messenger(self, ranks: list[int]) -> Messenger:
        return Messenger(self._new_group(ranks, "gloo"), self._timeout_seconds)

    def _new_group(self, ranks: list[int], backend: str) -> dist.ProcessGroup:
        group = dist.new_group(
            ranks,
            backend=backend,
            timeout=timedelta(seconds=self._timeout_seconds),
            use_local_synchronization=True,
        )
        assert isinstance(group, dist.ProcessGroup)
        return group
