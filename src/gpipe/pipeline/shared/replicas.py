"""Data parallelism: the processes that hold the same stages in R pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from gpipe.pipeline.job.device_work import DeviceWork
from gpipe.pipeline.job.errors import LostPeer, PipelineError
from gpipe.pipeline.job.host_memory import allocate_on_host
from gpipe.pipeline.job.messages import Messenger
from gpipe.pipeline.job.watch import PROBE_TAG, Watch


class Replicas:
    """The only replica of a pipeline: whatever it gathers is one value.

    Attributes:
        index: of this replica.
        count: R.
        group: connects the replicas, on the backend that carries tensors; None with one replica.
    """

    index, count = 0, 1
    group: dist.ProcessGroup | None = None

    def gather(self, value: Any) -> list[Any]:
        """Return the replicas' values, in order, on each; values are of JSON's types."""
        return [value]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that the host waits for the other replicas while the body runs.

        Raises:
            LostPeer: in place of an error of the connections; any other error is left as it is.
        """
        yield

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Note that the host waits for the other replicas in the body, and the GPU in work that the body gives it.

        Keep the body short: all work that it gives the GPU counts as waiting for the others.

        Raises:
            LostPeer: in place of an error of the connections; any other error is left as it is.
        """
        yield

    def wait_for_devices(self) -> None:
        """Wait until the GPU has received what was exchanged, before the host reads a number from it.

        Raises:
            PipelineError: as `Job.wait_for_devices`.
        """


class ReplicaGroup(Replicas):
    """This process and those that hold the same stages in the other pipelines; `messenger` connects them too."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        messenger: Messenger,
        watch: Watch,
        device: torch.device,
        device_work: DeviceWork,
    ) -> None:
        self.group: dist.ProcessGroup = group
        self.index, self.count = messenger.rank, messenger.size
        self._messenger, self._watch = messenger, watch
        self._device, self._device_work = device, device_work
        self._others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]

    def gather(self, value: Any) -> list[Any]:
        """Return the replicas' values, in order, on each; values are of JSON's types."""
        return self._messenger.gather(value)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that the host waits for the other replicas while the body runs."""
        try:
            with self._watch.waiting_for(self._others):
                yield
        except RuntimeError as error:
            if isinstance(error, PipelineError | LostPeer) or not self._is_broken(error):
                raise
            raise LostPeer(self._others, str(error)) from None

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Note that the host waits for the other replicas in the body, and the GPU in work that the body gives it."""
        with self.waiting(), self._device_work.exchanging(self._device, self._others):
            yield

    def wait_for_devices(self) -> None:
        """Wait until the GPU has received what was exchanged, before the host reads a number from it."""
        self._device_work.wait_for_devices([self._device], self._watch.raise_failure)

    def _is_broken(self, error: RuntimeError) -> bool:
        """Return whether a connection to another replica is gone; torch has no error class for that with Gloo."""
        if isinstance(error, dist.DistBackendError):
            return True
        try:
            for peer in range(self.count):
                if peer != self.index and dist.get_backend(self.group) == "gloo":
                    self.group.send([allocate_on_host(1)], peer, PROBE_TAG)
        except RuntimeError:
            return True
        return False
