"""What training asks of the data: mini-batches of an epoch, in an order that the epoch fixes."""

from collections.abc import Iterator
from typing import Any, Protocol

from gpipe.pipeline.engine import Pipeline


class Loader(Protocol):
    """Yields (inputs, targets) of the mini-batches of an epoch; either is None on a process that does not need it.

    Both are tensors or nests of tensors, whose first dimension is the examples.

    Every process of a pipeline iterates its own loader, and all yield the same number of mini-batches.
    """

    start_batch: int
    """The first mini-batch of the next iteration, to resume within an epoch; `set_epoch` puts it back to 0."""

    stride: int
    """How many mini-batches further the following one is; `set_epoch` puts it back to 1."""

    wait_seconds: float
    """How long the current iteration has waited for data so far."""

    num_replaced: int
    """In the place of how many examples, which are broken, the current iteration has yielded others so far."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch (from 0) of the next iteration."""

    def close(self) -> None:
        """End what an iteration keeps for the next one, such as processes."""

    def __len__(self) -> int:
        """Return the number of mini-batches an epoch, whatever `start_batch` is."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield the mini-batches `start_batch`, `start_batch + stride`, ..."""


def loaded(loader: Loader, pipeline: Pipeline) -> Iterator[tuple[Any, Any]]:
    """Yield what a loader does, and let the pipeline know while it is waited for, for messages about a failure."""
    batches = iter(loader)
    number = loader.start_batch
    while True:
        with pipeline.job.doing(f"loading mini-batch {number}"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
        number += loader.stride
