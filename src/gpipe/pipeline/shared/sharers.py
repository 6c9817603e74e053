"""The processes of one pipeline that hold copies of a tied parameter, and how a tensor gets from one to the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe.pipeline.job.errors import LostPeer
from gpipe.pipeline.job.watch import FOREVER, Watch


class Sharers:
    """This process and those of its pipeline that hold copies of the same parameters.

    A transfer has ended when its call returns, on CUDA too: who waits in vain is then known to wait.

    Args:
        group: these processes, on the backend that carries tensors.
        members: which processes of the pipeline they are, ascending.
        device: where this process computes.
        watch: ends a wait that is in vain.
    """

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int], device: torch.device, watch: Watch) -> None:
        self._group = group
        self._ranks = dict(zip(members, dist.get_process_group_ranks(group), strict=True))  # in the job
        self._device = device
        self._watch = watch

    def send(self, tensor: Tensor, process: int) -> None:
        """Send a tensor to one of them.

        Raises:
            LostPeer: a connection is gone.
            PeerFailure: another process failed.
        """
        part, rank = _bytes(tensor), self._ranks[process]
        with self._exchange([rank]):
            self._wait(self._group.send([part], dist.get_group_rank(self._group, rank), 0))

    def receive(self, into: Tensor, process: int) -> None:
        """Wait for a tensor of one of them; raises what `send` does."""
        rank = self._ranks[process]
        with _filled(into) as part, self._exchange([rank]):
            self._wait(self._group.recv([part], dist.get_group_rank(self._group, rank), 0))

    def broadcast(self, tensor: Tensor, process: int) -> None:
        """Give all of them the values that the tensor has in one of them; raises what `send` does."""
        source = self._ranks[process]
        is_source = source == dist.get_rank()
        others = [rank for rank in self._ranks.values() if rank != dist.get_rank()] if is_source else [source]
        with _filled(tensor) as part, self._exchange(others):
            options = dist.BroadcastOptions()
            options.rootRank, options.timeout = dist.get_group_rank(self._group, source), FOREVER
            self._wait(self._group.broadcast([part], options))

    def _wait(self, work: dist.Work) -> None:
        """Wait as long as the watch allows: Gloo would give up by itself, before anybody knows why."""
        if self._device.type == "cuda":
            work.wait()  # the stream waits; see `_exchange`
        else:
            work.wait(FOREVER)

    @contextmanager
    def _exchange(self, ranks: Sequence[int]) -> Iterator[None]:
        with self._watch.waiting_for(ranks), LostPeer.named(ranks):
            yield
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        self._watch.check()  # a wait on the device that was cut off ends without an error


def _bytes(tensor: Tensor) -> Tensor:
    """Return the values as bytes, in the order of the dimensions: no backend knows all types of torch."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@contextmanager
def _filled(tensor: Tensor) -> Iterator[Tensor]:
    """Give the values of a tensor as bytes, and take them over into it, however it lies in memory."""
    part = _bytes(tensor)
    yield part
    if not tensor.is_contiguous():
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
