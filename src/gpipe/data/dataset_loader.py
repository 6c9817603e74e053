"""Mini-batches of any torch Dataset."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from gpipe.data.epoch_loader import EpochLoader, EpochOptions
from gpipe.data.randomness import preserve_generators, seed_mini_batch, seed_sample


class DatasetLoader(EpochLoader[tuple[Any, Any]]):
    """Yields the mini-batches of an epoch of a torch Dataset, whose items are pairs (input, target).

    A resumed run sees the same mini-batches as one that never stopped: their order is a function of (seed, epoch).
    torch's, numpy's and Python's generators are seeded for each item by (seed, epoch, index), and for `collate` by
    (seed, epoch, number of the mini-batch).

    Args:
        dataset: has a length, and items by index.
        batch_size: examples per replica and step.
        seed: the seed of the order and of the items' random numbers.
        num_workers: processes that read items; 0 reads in this process. Only the speed depends on it.
        collate: turns a list of items into a mini-batch (inputs, targets); torch's by default.
        options: those of EpochOptions; `shuffle` is required.

    Raises:
        TypeError: the dataset has no length.
        ValueError: a setting is wrong, or there are too few items for one mini-batch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        seed: int,
        *,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] = default_collate,
        **options: Unpack[EpochOptions],
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                f"dataset is of type {type(dataset).__name__}, which has no length: give one with a length and items "
                "by index, such as a list of its items."
            )
        num_examples = len(dataset)
        super().__init__(num_examples, batch_size, seed, noun="example", **options)
        self._dataset, self._num_workers, self._collate = dataset, num_workers, collate

    def _read(self) -> Iterator[tuple[Any, Any]]:
        reader = DataLoader(
            _SeededBatches(self._dataset, self._collate, self._seed, self.epoch),
            batch_size=None,  # a request is a whole mini-batch
            sampler=[(number, indices.tolist()) for number, indices in self._parts()],
            collate_fn=keep_batch,
            num_workers=self._num_workers,
            generator=torch.Generator(),  # otherwise it draws from the global one
        )
        return map(_unpack, reader)


@dataclass(eq=False)
class _SeededBatches(Dataset[Any]):
    """The mini-batches of one epoch of a dataset, by their numbers and the indices of their items."""

    dataset: Dataset[Any]
    collate: Callable[[list[Any]], Any]
    seed: int
    epoch: int

    def __getitem__(self, request: tuple[int, list[int]]) -> Any:
        number, indices = request
        items = []
        with preserve_generators():
            for index in indices:
                seed_sample(self.seed, self.epoch, index)
                items.append(self.dataset[index])
            seed_mini_batch(self.seed, self.epoch, number)
            return self.collate(items)


def _unpack(batch: Any) -> tuple[Any, Any]:
    try:
        if isinstance(batch, dict | torch.Tensor):
            raise TypeError("its names, or its rows, would be taken for inputs and targets")
        inputs, targets = batch
    except (TypeError, ValueError):
        kind = type(batch).__name__
        found = f"a {kind} of {len(batch)} entries" if isinstance(batch, tuple | list | dict) else f"of type {kind}"
        raise TypeError(
            f"a mini-batch of the dataset is {found}, expected (inputs, targets): make its items pairs (input, "
            "target), or pass collate=, which makes such a pair from a list of items."
        ) from None
    return inputs, targets


def keep_batch(batch: Any) -> Any:
    """Return a mini-batch that needs no collating."""
    return batch
