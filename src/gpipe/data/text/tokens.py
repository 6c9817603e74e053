"""Token sets, which are sequences of tokens by index, and their mini-batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpipe.data.epoch_loader import EpochLoader, EpochOptions
from gpipe.data.images.image_set import SPLITS

_RANDOM_TOKENS = 0x70C  # keeps this noise apart from other random data


class TokenSet(Protocol):
    """Sequences of tokens. `TokenLoader` accepts anything with these two members."""

    def __len__(self) -> int:
        """Return the number of sequences."""

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Return sequence `index`, [length + 1]: all tokens but the last are inputs, all but the first are targets.

        The sequences of a mini-batch have equal lengths.
        """


@dataclass(frozen=True)
class RandomTokens:
    """Sequences of uniformly random tokens, to measure speed; there is nothing to learn in them.

    Sequence i has sequence_length + 1 tokens below vocabulary_size, and is a function of the split and of i.
    """

    split: str
    num_sequences: int
    sequence_length: int
    vocabulary_size: int

    def __len__(self) -> int:
        return self.num_sequences

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Draw sequence `index`."""
        generator = np.random.default_rng([_RANDOM_TOKENS, SPLITS.index(self.split), index])
        return generator.integers(self.vocabulary_size, size=self.sequence_length + 1)


class TokenLoader(EpochLoader[tuple[Tensor, Tensor]]):
    """Yields the mini-batches of an epoch: (tokens, the token after each), both int64 [n, time].

    Looking tokens up costs next to nothing, so there are no worker processes, and every stage loads both. Arguments and
    errors are those of EpochLoader.
    """

    def __init__(self, token_set: TokenSet, batch_size: int, seed: int, **options: Unpack[EpochOptions]) -> None:
        super().__init__(len(token_set), batch_size, seed, noun="sequence", **options)
        self._token_set = token_set

    def _read(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _, indices in self._parts():
            sequences = torch.from_numpy(np.stack([self._token_set.sequence(int(index)) for index in indices]))
            yield sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
