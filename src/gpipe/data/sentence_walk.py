"""Which pairs an epoch draws of each language: a walk that is a function of (seed, epoch)."""

import numpy as np
from numpy.typing import NDArray

from gpipe.data.randomness import walk_generator


class SentenceWalk:
    """Walk through the pairs of each language again and again, each time in an order of its own.

        language with 4 pairs    | 2 0 3 1 | 1 3 2 0 | 0 1 ...      passes
        5 pairs an epoch         | epoch 0   | epoch 1   |

    So no pair comes twice before all others of its language have come, over all epochs; and where an epoch begins
    follows from its number alone. A language whose share of an epoch is 0.3 pairs is in three of ten epochs.

    num_pairs: of each language. draws: pairs of each language that an epoch draws, on average; need not be whole.
    """

    def __init__(self, num_pairs: NDArray[np.int64], draws: NDArray[np.float64], seed: int) -> None:
        self._num_pairs = num_pairs
        self._draws = draws
        self._seed = seed
        self._first = walk_generator(seed).random(len(draws))

    def draw(self, epoch: int, stretch: float = 1.0) -> list[NDArray[np.int64]]:
        """Return the indices of the pairs of each language that an epoch draws.

        stretch: walks on so many times as far, into what the next epoch begins with.
        """
        starts = np.floor(epoch * self._draws + self._first).astype(np.int64)
        ends = np.floor((epoch + stretch) * self._draws + self._first).astype(np.int64)
        return [self._walk(number, *bounds) for number, bounds in enumerate(zip(starts, ends, strict=True))]

    def _walk(self, language: int, start: int, end: int) -> NDArray[np.int64]:
        if start == end:
            return np.empty(0, np.int64)
        size = int(self._num_pairs[language])
        passes = range(start // size, -(-end // size))
        steps = np.concatenate([self._order(language, number, size) for number in passes])
        return steps[start - passes.start * size : end - passes.start * size]

    def _order(self, language: int, number: int, size: int) -> NDArray[np.int64]:
        return walk_generator(self._seed, language, number).permutation(size)
