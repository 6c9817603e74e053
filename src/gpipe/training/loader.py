"""What training needs from the data: the mini-batches of an epoch, in an order that the epoch determines."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat
from typing import Any, Protocol, runtime_checkable

from gpipe.pipeline.engine import Pipeline


@runtime_checkable
class Loader(Protocol):
    """Yields the mini-batches of an epoch as (inputs, targets); either is None on a process that does not need it.

    Both are tensors or nests of tensors, whose first dimension is the examples. Every process of a pipeline iterates
    over its own loader, and all yield the same number of mini-batches.
    """

    batch_numbers: Sequence[int] | None
    """The next iteration's mini-batches, numbered from 0, ascending; `set_epoch` resets it to None, which means all."""

    wait_seconds: float
    """The seconds that the current iteration has waited for data so far."""

    num_replaced: int
    """The number of broken examples that this iteration has replaced so far."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch (from 0) of the next iteration."""

    def close(self) -> None:
        """Release what an iteration keeps for the next one, such as processes."""

    def __len__(self) -> int:
        """Return the number of mini-batches per epoch, independent of `batch_numbers`."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield the mini-batches of `batch_numbers`."""


def iterate(loader: Loader, pipeline: Pipeline) -> Iterator[tuple[Any, Any]]:
    """Yield a loader's mini-batches, and note each wait in the pipeline, so that the message of a failure names it."""
    batches = iter(loader)
    for number in chain(number_batches(loader), repeat(len(loader))):
        with pipeline.job.activity.doing(f"loading mini-batch {number}"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def number_batches(loader: Loader) -> Sequence[int]:
    """Return the numbers of the mini-batches of a loader's next iteration."""
    return range(len(loader)) if loader.batch_numbers is None else loader.batch_numbers


class RepeatedLoader:
    """Repeats the first mini-batches of a loader's first epoch, until there are as many as the loader has in an epoch.

    They are loaded once and kept. A model that can learn will memorise them.
    """

    def __init__(self, loader: Loader, num_batches: int) -> None:
        self._loader, self._num_batches = loader, min(num_batches, len(loader))
        self._kept: list[tuple[Any, Any]] = []
        self.wait_seconds, self.num_replaced = 0.0, 0
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; all epochs have the same mini-batches."""
        self.batch_numbers: Sequence[int] | None = None

    def close(self) -> None:
        """Release what the loader keeps."""
        self._loader.close()

    def __len__(self) -> int:
        """Return the number of mini-batches per epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield the mini-batches of batch_numbers."""
        self.wait_seconds, self.num_replaced = 0.0, 0
        if not self._kept:
            self._loader.set_epoch(0)
            self._kept = list(islice(self._loader, self._num_batches))
            self._loader.close()
            self.wait_seconds, self.num_replaced = self._loader.wait_seconds, self._loader.num_replaced
        for number in number_batches(self):
            yield self._kept[number % self._num_batches]
