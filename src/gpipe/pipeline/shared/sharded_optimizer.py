"""The optimizer's state, sharded over the replicas: each updates some parameters for all (ZeRO, stage 1).

    gradients (averages, on every replica)     a b c d        a b c d
    each updates its own                       a . c .        . b . d
    and sends them to the others               a b c d        a b c d

Torch's ZeroRedundancyOptimizer does the same, but its module compiles functional optimizers with TorchScript, which
torch deprecates; it refuses named parameters, and sends every parameter separately.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gpipe.pipeline.job.job import Job
from gpipe.pipeline.shared.averaging import group_alike


class ShardedOptimizer(Optimizer):
    """An optimizer that keeps only the state of this replica's parameters; each is updated as without replicas.

    Every replica makes one and calls the same methods.

    Args:
        whole: a new optimizer of the parameters of a process's stages; it must skip those without a gradient.
        job: the pipeline's, with several replicas.

    Attributes:
        whole: the same.
    """

    def __init__(self, whole: Optimizer, job: Job) -> None:
        super().__init__(whole.param_groups, whole.defaults)
        self.whole, self.state, self._job = whole, whole.state, job
        parameters = [parameter for group in whole.param_groups for parameter in group["params"]]
        sizes = [parameter.nbytes for parameter in parameters]
        self._owners: dict[Tensor, int] = dict(zip(parameters, share_out(sizes, job.num_replicas), strict=True))
        self._buckets = [
            (replica, bucket)
            for replica in range(job.num_replicas)
            for bucket in group_alike(parameter for parameter in parameters if self._owners[parameter] == replica)
        ]

    def keeps(self, parameter: Tensor) -> bool:
        """Return whether this replica keeps the state of a parameter."""
        return self._owners[parameter] == self._job.replica_index

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update this replica's parameters, and receive the others from the replicas that update them.

        Raises:
            PipelineError: another replica is gone or hangs.
        """
        assert closure is None
        others = {parameter: parameter.grad for parameter in self._owners if not self.keeps(parameter)}
        for parameter in others:
            parameter.grad = None
        try:
            self.whole.step()
        finally:
            for parameter, gradient in others.items():
                parameter.grad = gradient
        with self._job.guard(), self._job.replicas.waiting():
            self._exchange_parameters()

    @torch.no_grad()
    def _exchange_parameters(self) -> None:
        under_way: deque[tuple[int, list[Parameter], Tensor, dist.Work]] = deque()
        for replica, bucket in self._buckets:
            flat = torch.cat([parameter.flatten() for parameter in bucket])
            work = dist.broadcast(flat, group=self._job.replicas.group, group_src=replica, async_op=True)
            under_way.append((replica, bucket, flat, work))
            if len(under_way) > 1:  # at most two copies at once
                self._take(*under_way.popleft())
        while under_way:
            self._take(*under_way.popleft())

    def _take(self, replica: int, bucket: list[Parameter], flat: Tensor, work: dist.Work) -> None:
        """Wait for the parameters of a bucket, and put them in their places."""
        with self._job.replicas.exchange():
            work.wait()
        if replica != self._job.replica_index:
            for parameter, part in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                parameter.copy_(part.view(parameter.shape))

    @torch.no_grad()
    def gather(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state of all parameters; other replicas' tensors are on the first one's host, and empty elsewhere.

        Tensors are sent one after another, so that a device never holds more than one that is not its own.

        Args:
            own: what this replica keeps, by name; tensors without dimensions are numbers in the host's memory.
        """
        found: dict[str, Tensor] = {}
        with self._job.guard(), self._job.replicas.waiting():
            specs = [
                (name, str(one.dtype), list(one.shape), None if one.ndim else one.item()) for name, one in own.items()
            ]
            for replica, part in enumerate(self._job.replicas.gather(specs)):
                for name, dtype, shape, number in part:
                    found[name] = self._receive(own.get(name), replica, getattr(torch, dtype[6:]), shape, number)
        return found

    def _receive(self, own: Tensor | None, replica: int, dtype: torch.dtype, shape: list[int], number: Any) -> Tensor:
        """Return one tensor of a replica's state."""
        if number is not None:
            return torch.tensor(number, device="cpu", dtype=dtype)
        device = next(iter(self._job.devices.values()))
        sent = torch.empty(shape, dtype=dtype, device=device) if own is None else own.contiguous()
        self._job.replicas.broadcast(sent, replica)
        if own is not None:
            return own
        if self._job.replica_index != 0:  # the first replica saves
            return sent.new_empty(0)
        self._job.wait_for_devices()
        return sent.cpu()


def share_out(sizes: Sequence[int], num_replicas: int) -> list[int]:
    """Return the replica of each parameter: the largest first, each to the replica that has least so far."""
    shares, owners = [0] * num_replicas, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        owners[place] = shares.index(min(shares))
        shares[owners[place]] += sizes[place]
    return owners
