"""Data parallelism: the processes that hold the same stages in R pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor


class Replicas:
    """The only replica of a pipeline: whatever it gathers is one value. Several are `Peers`.

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
        """Do as `waiting`, and note that the GPU waits for the other replicas in work that the body gives it.

        Keep the body short: all work that it gives the GPU counts as waiting for the others.
        """
        yield

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give all replicas the values that a dense tensor has in one of them; raises as `waiting` does."""

    def wait_for_devices(self) -> None:
        """Wait until the GPU has received what was exchanged, before the host reads a number from it.

        Raises:
            PipelineError: as `Job.wait_for_devices`.
        """
