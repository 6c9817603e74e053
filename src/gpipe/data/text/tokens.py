"""Token sets: sequences of token numbers that are looked up by index."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gpipe.data.images.source import SPLITS

_RANDOM_TOKENS = 0x70C  # keeps these numbers apart from those of other random data


class TokenSet(Protocol):
    """Hold sequences of tokens. Anything with these two members works in `TokenLoader`."""

    def __len__(self) -> int:
        """Return the number of sequences."""

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Return sequence `index`, [length + 1]: all but the last are read, all but the first are to be told.

        The sequences of a mini-batch have one length.
        """


class RandomTokens:
    """Hold sequences of evenly distributed tokens, in which there is nothing to learn: they measure speed.

    Sequence i, sequence_length + 1 tokens below vocabulary_size, is a function of the split and of i.
    Raises ValueError for an unknown split.
    """

    def __init__(self, split: str, num_sequences: int, sequence_length: int, vocabulary_size: int) -> None:
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
        self._split = SPLITS.index(split)
        self._num_sequences = num_sequences
        self._sequence_length = sequence_length
        self._vocabulary_size = vocabulary_size

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self._num_sequences

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Draw sequence `index`."""
        generator = np.random.default_rng([_RANDOM_TOKENS, self._split, index])
        return generator.integers(self._vocabulary_size, size=self._sequence_length + 1)
