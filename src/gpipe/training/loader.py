"""What training needs of the data: the mini-batches of an epoch, in an order that the epoch fixes."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from gpipe.pipeline.engine import Pipeline


@runtime_checkable
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


class RepeatedLoader:
    """Yields the first mini-batches of a loader's first epoch, in turn, as many as that loader has in an epoch.

    They are loaded once and kept. What a model that can learn sees again and again, it learns by heart.
    """

    def __init__(self, loader: Loader, num_batches: int) -> None:
        self._loader, self._num_batches = loader, min(num_batches, len(loader))
        self._kept: list[tuple[Any, Any]] = []
        self.wait_seconds, self.num_replaced = 0.0, 0
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; all have the same mini-batches."""
        self.start_batch, self.stride = 0, 1

    def close(self) -> None:
        """Release what the loader keeps."""
        self._loader.close()

    def __len__(self) -> int:
        """Return the number of mini-batches per epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield the mini-batches from start_batch on."""
        self.wait_seconds, self.num_replaced = 0.0, 0
        if not self._kept:
            self._loader.set_epoch(0)
            self._kept = list(islice(self._loader, self._num_batches))
            self._loader.close()
            self.wait_seconds, self.num_replaced = self._loader.wait_seconds, self._loader.num_replaced
        for number in range(self.start_batch, len(self), self.stride):
            yield self._kept[number % self._num_batches]
