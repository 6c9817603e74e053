"""Many sentences of token ids in one array: a few bytes a token, and a whole mini-batch is read at once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpipe.data.special_tokens import END, PADDING


@dataclass(frozen=True)
class Sentences:
    """Hold sentence i as tokens[starts[i] : starts[i] + lengths[i]], END included.

    tokens: ids, any integer type, in memory or mapped from a file. owner: what must live as long as the tokens do.
    """

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    owner: object = None

    def __len__(self) -> int:
        """Return the number of sentences."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return the ids of one sentence, int64 [length], END included."""
        start = self.starts[index]
        return self.tokens[start : start + self.lengths[index]].astype(np.int64)

    def select(self, rows: NDArray[Any]) -> "Sentences":
        """Return some of the sentences, by their indices or a mask, without a copy of the tokens."""
        return Sentences(self.tokens, self.starts[rows], self.lengths[rows], self.owner)

    def padded(self, rows: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """Return sentences by their indices, int64 [len(rows), width], filled up with PADDING on the right.

        width: at least the longest of them.
        """
        columns = np.arange(width)
        inside = columns < self.lengths[rows, None]
        batch = np.full(inside.shape, PADDING, np.int64)
        batch[inside] = self.tokens[(self.starts[rows, None] + columns)[inside]]
        return batch

    @classmethod
    def pack(cls, sentences: Iterable[Sequence[int]], vocabulary_size: int) -> "Sentences":
        """Copy sentences without END into one array, in two bytes a token where the vocabulary allows it."""
        kind = np.uint16 if vocabulary_size <= 1 << 16 else np.int32
        parts = [np.array([*sentence, END], kind) for sentence in sentences]
        lengths = np.array([len(part) for part in parts], np.int32)
        tokens = np.concatenate(parts) if parts else np.empty(0, kind)
        return cls(tokens, starts_of(lengths), lengths)

    @classmethod
    def join(cls, packed: "Sequence[Sentences]") -> "Sentences":
        """Return the sentences of several packed ones, in their order."""
        lengths = np.concatenate([part.lengths for part in packed])
        return cls(np.concatenate([part.tokens for part in packed]), starts_of(lengths), lengths)


def starts_of(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return where each sentence starts when they stand one behind the other."""
    return np.cumsum(lengths, dtype=np.int64) - lengths
