"""Data parallelism: the processes that hold the same stages in R pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from gpipe.pipeline.job.errors import LostPeer, PipelineError
from gpipe.pipeline.job.messages import Messenger
from gpipe.pipeline.job.watch import PROBE_TAG, Watch


class Replicas:
    """This process and those that hold the same stages in the other pipelines.

    Args:
        group: these processes, on the backend that carries tensors.
        messenger: the same processes, for small messages.
        watch: ends a wait that is in vain.
    """

    def __init__(self, group: dist.ProcessGroup, messenger: Messenger, watch: Watch) -> None:
        self.group = group
        self.index = messenger.rank
        self.count = messenger.size
        self.messenger = messenger
        self._watch = watch
        self._others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Let the other replicas be waited for while the body runs.

        Raises:
            LostPeer: in place of an error of the connections; any other error is left as it is.
        """
        try:
            with self._watch.waiting_for(self._others):
                yield
        except RuntimeError as error:
            if isinstance(error, PipelineError | LostPeer) or not self._is_broken(error):
                raise
            raise LostPeer(self._others, str(error)) from None

    def _is_broken(self, error: RuntimeError) -> bool:
        """Return whether a connection to another replica is gone; torch has no class for such an error of Gloo's."""
        if isinstance(error, dist.DistBackendError):
            return True
        try:
            for peer in range(self.count):
                if peer != self.index and dist.get_backend(self.group) == "gloo":
                    self.group.send([torch.empty(1)], peer, PROBE_TAG)
        except RuntimeError:
            return True
        return False

    def gather(self, value: Any) -> list[Any]:
        """Return the replicas' values, in their order, on each; values are what JSON can carry."""
        return self.messenger.gather(value)
