"""Training on the same few mini-batches again and again: what a model that can learn learns by heart."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from gpipe.training.loader import Loader


class RepeatedLoader:
    """Yields the first mini-batches of a loader's first epoch, in turn, as many as that loader has in an epoch.

    They are loaded once and kept.
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
