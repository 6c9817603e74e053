"""The order in which an epoch shows the examples, and this replica's part of each mini-batch."""

import math

import numpy as np
from numpy.typing import NDArray

from gpipe.data.epoch_position import EpochPosition
from gpipe.data.randomness import epoch_order


class EpochLoader(EpochPosition):
    """What loaders of examples share: which of them make up which mini-batch.

        order of the epoch       | 7 2 5 0 | 3 6 1 4 |     batch_size 2, 2 replicas
        replica 0 gets           | 7   5   | 3   1   |
        replica 1 gets           |   2   0 |   6   4 |

    batch_size: examples a replica and step, so a mini-batch has batch_size x num_replicas; together, the replicas get
    the mini-batches of one replica with that larger batch_size. The last mini-batch may be smaller, unless drop_last.
    shuffle: the order is a function of (seed, epoch); False keeps the set's order. noun: what an error calls examples.

    Raises ValueError for wrong settings, also where a last mini-batch is too small to give every replica an example
    (they would wait for each other).
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        seed: int,
        *,
        shuffle: bool,
        replica_index: int,
        num_replicas: int,
        drop_last: bool,
        noun: str,
    ) -> None:
        super().__init__(seed, replica_index, num_replicas)
        self._num_examples = num_examples
        self._shuffle = shuffle
        self._mini_batch_size = batch_size * num_replicas
        self._num_batches = _count_batches(num_examples, batch_size, num_replicas, drop_last, noun)

    def _parts(self) -> list[NDArray[np.int64]]:
        """Return the indices of this replica's part of the mini-batches start_batch, start_batch + stride, ..."""
        self._check_start()
        num = self._num_examples
        order = epoch_order(self._seed, self.epoch, num) if self._shuffle else np.arange(num)
        size = self._mini_batch_size
        starts = range(self.start_batch * size, len(self) * size, self.stride * size)
        return [order[start : start + size][self._replica_index :: self._num_replicas] for start in starts]


def _count_batches(num_examples: int, batch_size: int, num_replicas: int, drop_last: bool, noun: str) -> int:
    if batch_size < 1:
        raise ValueError(f"batch_size {batch_size} must be at least 1")
    mini_batch_size = batch_size * num_replicas
    remainder = num_examples % mini_batch_size
    if num_examples == 0 or (drop_last and num_examples < mini_batch_size):
        raise ValueError(
            f"{num_examples} {noun}s make no mini-batch of {mini_batch_size}: lower trainer.batch_size to at most "
            f"{num_examples}, or add {noun}s"
        )
    if 0 < remainder < num_replicas and not drop_last:
        raise ValueError(
            f"the last mini-batch has {remainder} {noun}(s) for {num_replicas} replicas: "
            f"choose another batch_size than {batch_size}, or drop_last"
        )
    return num_examples // mini_batch_size if drop_last else math.ceil(num_examples / mini_batch_size)
