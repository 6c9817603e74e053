"""What training needs of the data: the mini-batches of an epoch, in an order that the epoch fixes."""

from collections.abc import Iterator
from typing import Any, Protocol

from gpipe.pipeline.engine import Pipeline


class Loader(Protocol):
    """Yields the mini-batches of an epoch as (inputs, targets); either is None on a process that does not need it.

    Both are tensors or nests of tensors, whose first dimension is the examples. Every process of a pipeline iterates
    its own loader, and all yield the same number of mini-batches.
    """

    start_batch: int
    """The first mini-batch of the next iteration, to resume within an epoch; `set_epoch` resets it to 0."""

    stride: int
    """The step from one mini-batch to the next; `set_epoch` resets it to 1."""

    wait_seconds: float
    """How long the current iteration has waited for data so far."""

    num_replaced: int
    """The number of broken examples that this iteration has replaced so far."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch (from 0) of the next iteration."""

    def close(self) -> None:
        """Release what an iteration keeps for the next one, such as processes."""

    def __len__(self) -> int:
        """Return the number of mini-batches per epoch, whatever `start_batch` is."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield the mini-batches `start_batch`, `start_batch + stride`, ..."""


def iterate(loader: Loader, pipeline: Pipeline) -> Iterator[tuple[Any, Any]]:
    """Yield a loader's mini-batches, telling the pipeline about the wait, which a failure's message then names."""
    batches = iter(loader)
    number = loader.start_batch
    while True:
        with pipeline.job.activity.doing(f"loading mini-batch {number}"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
        number += loader.stride
