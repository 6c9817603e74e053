"""The order in which an epoch shows the examples, and this replica's part of each mini-batch."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Required, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpipe.data.randomness import make_epoch_generator

_Batch = TypeVar("_Batch")


class EpochPosition(ABC, Generic[_Batch]):
    """What all loaders share: the seed, the epoch, and this process's replica.

    A subclass sets `_num_batches`, the number of mini-batches per epoch, and its `_read` reads those of batch_numbers.

    Raises:
        ValueError: the seed is negative, or replica_index is outside 0 .. num_replicas - 1.

    Attributes:
        batch_numbers: the numbers of the next iteration's mini-batches, ascending, to resume within an epoch or to
            divide an evaluation between replicas. None means all; set_epoch resets it to None.
        wait_seconds: the seconds that this iteration has waited for data so far.
        num_replaced: the number of broken examples that this process has replaced in this iteration so far.
    """

    batch_numbers: Sequence[int] | None
    _num_batches: int

    def __init__(self, seed: int, replica_index: int, num_replicas: int) -> None:
        if seed < 0:
            raise ValueError(f"seed {seed} must not be negative")
        if not 0 <= replica_index < num_replicas:
            raise ValueError(f"replica_index {replica_index} must lie in 0 to num_replicas - 1 = {num_replicas - 1}")
        self._seed = seed
        self._replica_index, self._num_replicas = replica_index, num_replicas
        self.wait_seconds, self.num_replaced = 0.0, 0
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, which begins with its first mini-batch."""
        self.epoch, self.batch_numbers = epoch, None

    def close(self) -> None:
        """Release what one iteration keeps for the next."""

    def __len__(self) -> int:
        """Return the number of mini-batches per epoch; batch_numbers do not change it."""
        return self._num_batches

    def __iter__(self) -> Iterator[_Batch]:
        """Yield the mini-batches of batch_numbers."""
        self.wait_seconds, self.num_replaced = 0.0, 0
        started = time.perf_counter()
        for batch in self._read():
            self.wait_seconds += time.perf_counter() - started
            yield batch
            started = time.perf_counter()

    @abstractmethod
    def _read(self) -> Iterable[_Batch]:
        """Read the mini-batches of batch_numbers, one at a time: `__iter__` measures the wait for each."""

    def _batch_numbers(self) -> Sequence[int]:
        """Return the numbers of the mini-batches of the next iteration."""
        numbers = range(len(self)) if self.batch_numbers is None else self.batch_numbers
        if numbers and not 0 <= numbers[0] <= numbers[-1] < len(self):
            raise ValueError(f"batch_numbers {numbers} must ascend and lie in 0 to {len(self) - 1}")
        return numbers


class EpochOptions(TypedDict, total=False):
    """Keyword arguments of every EpochLoader.

    Attributes:
        shuffle: False keeps the set's order.
        replica_index: this process's replica; 0 by default.
        num_replicas: the number of replicas that share each mini-batch; 1 by default.
        drop_last: leave out a last mini-batch that is smaller than the others; False by default.
    """

    shuffle: Required[bool]
    replica_index: int
    num_replicas: int
    drop_last: bool


class EpochLoader(EpochPosition[_Batch]):
    """What all loaders of examples share: which examples are in which mini-batch.

        order of the epoch       | 7 2 5 0 | 3 6 1 4 |     batch_size 2, 2 replicas
        replica 0 gets           | 7   5   | 3   1   |
        replica 1 gets           |   2   0 |   6   4 |

    Args:
        num_examples: the size of the data set.
        batch_size: examples per replica and step. Together, R replicas get the mini-batches that one replica would get
            with R times this batch_size.
        seed: the seed of the order, which is a function of (seed, epoch).
        noun: what errors call an example.
        shuffle, replica_index, num_replicas, drop_last: as in EpochOptions.

    Raises:
        ValueError: a setting is wrong, or the last mini-batch is too small to give every replica an example.
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        seed: int,
        *,
        noun: str,
        shuffle: bool,
        replica_index: int = 0,
        num_replicas: int = 1,
        drop_last: bool = False,
    ) -> None:
        super().__init__(seed, replica_index, num_replicas)
        self._num_examples, self._shuffle = num_examples, shuffle
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} must be at least 1")
        self._mini_batch_size = size = batch_size * num_replicas
        remainder = num_examples % size
        if num_examples == 0 or (drop_last and num_examples < size):
            raise ValueError(
                f"{num_examples} {noun}s are too few for a mini-batch of {size}: lower trainer.batch_size to "
                f"at most {num_examples}, or add {noun}s"
            )
        # A replica without an example would leave the others waiting.
        if 0 < remainder < num_replicas and not drop_last:
            raise ValueError(
                f"the last mini-batch has {remainder} {noun}(s) for {num_replicas} replicas: "
                f"choose a batch_size other than {batch_size}, or drop_last"
            )
        self._num_batches = num_examples // size if drop_last else math.ceil(num_examples / size)

    def _parts(self) -> list[tuple[int, NDArray[np.int64]]]:
        """Return the number of each mini-batch of the next iteration, with the indices of this replica's part."""
        num, size = self._num_examples, self._mini_batch_size
        order = make_epoch_generator(self._seed, self.epoch).permutation(num) if self._shuffle else np.arange(num)
        own = slice(self._replica_index, None, self._num_replicas)
        return [(n, order[size * n : size * (n + 1)][own]) for n in self._batch_numbers()]
