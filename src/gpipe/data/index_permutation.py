"""A random order of any number of things, which takes no memory."""

from collections.abc import Iterator

import numpy as np

_NUM_ROUNDS = 8
_WORD = (1 << 64) - 1


class IndexPermutation:
    """Permute range(num) index by index, by a Feistel network over the next even number of bits.

        left | right  ->  right | left ^ hash(right, key)        a round, which can be undone, whatever the hash is

    What falls outside of the range goes through the network again, until it falls inside. Luby and Rackoff (1988) show
    that four rounds cannot be told from a random permutation where the hash cannot be told from a random function; it
    is SplitMix64's here (Steele et al. 2014), and few bits get twice the rounds.

    generator: the keys are drawn from it.
    """

    def __init__(self, num: int, generator: np.random.Generator) -> None:
        self._num = num
        self._keys = [int(key) for key in generator.integers(1 << 63, size=_NUM_ROUNDS)]
        self._half = max(1, ((num - 1).bit_length() + 1) // 2)

    def __len__(self) -> int:
        """Return how many indices there are."""
        return self._num

    def __getitem__(self, index: int) -> int:
        """Return what stands at a place of the order. Raises IndexError outside of range(num)."""
        if not 0 <= index < self._num:
            raise IndexError(f"{index} is not below {self._num}")
        index = self._network(index)
        while index >= self._num:
            index = self._network(index)
        return index

    def __iter__(self) -> Iterator[int]:
        """Yield the whole order."""
        return map(self.__getitem__, range(self._num))

    def _network(self, index: int) -> int:
        half = self._half
        mask = (1 << half) - 1
        left, right = index >> half, index & mask
        for key in self._keys:
            left, right = right, left ^ (_hash(right + key & _WORD) & mask)
        return left << half | right


def _hash(word: int) -> int:
    """Return the finalizer of SplitMix64."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
