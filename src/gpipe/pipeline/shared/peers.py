"""Processes that exchange tensors during a step: the replicas of a stage, or those that hold a tied parameter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe.pipeline.job.device_work import DeviceWork
from gpipe.pipeline.job.errors import LostPeer, PipelineError
from gpipe.pipeline.job.host_memory import allocate_on_host
from gpipe.pipeline.job.messages import Messenger
from gpipe.pipeline.job.watch import FOREVER, PROBE_TAG, Watch
from gpipe.pipeline.shared.replicas import Replicas


class Peers(Replicas):
    """Some processes of the job, one of them this one, in a group on the backend that carries tensors.

    messenger: also connects them, if they gather values as replicas do.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        watch: Watch,
        device: torch.device,
        device_work: DeviceWork,
        messenger: Messenger | None = None,
    ) -> None:
        self.group: dist.ProcessGroup = group
        self._watch, self._device, self._device_work, self._messenger = watch, device, device_work, messenger
        self._ranks = dist.get_process_group_ranks(group)  # in the job
        self.index, self.count = self._ranks.index(dist.get_rank()), len(self._ranks)
        self._others = [rank for rank in self._ranks if rank != dist.get_rank()]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all, in order, on each; values are of JSON's types."""
        assert self._messenger is not None
        return self._messenger.gather(value)

    @contextmanager
    def waiting(self, *ranks: int) -> Iterator[None]:
        """Note that the host waits for the other processes, or only for `ranks`, while the body runs.

        Raises:
            LostPeer: in place of an error of the connections; any other error is left as it is.
        """
        others = ranks or self._others
        try:
            with self._watch.waiting_for(others):
                yield
        except RuntimeError as error:
            if isinstance(error, PipelineError | LostPeer) or not self._is_broken(error):
                raise
            raise LostPeer(others, str(error)) from None

    @contextmanager
    def exchange(self, *ranks: int) -> Iterator[None]:
        """Do as `waiting`, and note that the GPU waits for the same processes in work that the body gives it."""
        with self.waiting(*ranks), self._device_work.exchanging(self._device, ranks or self._others):
            yield

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, source: int, target: int | None = None) -> None:
        """Give all of them the values that a dense tensor has in number `source` of them; raises as `waiting` does.

        target: the only one to give them to; then these two alone call it.
        """
        if tensor.numel() == 0:
            return
        # An element that an expanded tensor repeats travels once. As bytes: no backend knows all of torch's types.
        own = tensor.detach()[tuple(slice(None) if stride else 0 for stride in tensor.stride())]
        part = own.contiguous().view(-1).view(torch.uint8)
        other = target if source == self.index else source
        with self.exchange(*([] if other is None else [self._ranks[other]])):
            if target is None:
                dist.broadcast(part, group=self.group, group_src=source)
            else:
                move, peer = (self.group.send, target) if source == self.index else (self.group.recv, source)
                # Gloo by itself would give up before the cause is known; with a limit, NCCL would hold up the host.
                move([part], peer, 0).wait(*([FOREVER] if self._device.type == "cpu" else []))
        if not own.is_contiguous():
            own.copy_(part.view(own.dtype).view(own.shape))

    def wait_for_devices(self) -> None:
        """Wait until the GPU has received what was exchanged, before the host reads a number from it."""
        self._device_work.wait_for_devices([self._device], self._watch.raise_failure)

    def _is_broken(self, error: RuntimeError) -> bool:
        """Return whether a connection to another process is gone; torch has no error class for that with Gloo."""
        if isinstance(error, dist.DistBackendError):
            return True
        try:
            for peer in range(self.count):
                if peer != self.index and dist.get_backend(self.group) == "gloo":
                    self.group.send([allocate_on_host(1)], peer, PROBE_TAG)
        except RuntimeError:
            return True
        return False
