"""Many sentences of token ids in one array: a few bytes per token, and one read per mini-batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gpipe.data.text.tokenizer import END, PADDING


@dataclass(frozen=True)
class Sentences:
    """Sentence i is tokens[starts[i] : starts[i] + lengths[i]], END included; tokens have any integer type."""

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return the ids of one sentence, int64 [length], END included."""
        rows = np.array([range(len(self))[index]])
        (sentence,) = self.pad(rows, int(self.get_lengths(rows)[0]))
        return np.asarray(sentence)

    def select(self, rows: NDArray[Any] | slice) -> Self:
        """Return some of the sentences, by indices, mask or slice; the tokens are not copied."""
        return replace(self, starts=self.starts[rows], lengths=self.lengths[rows])

    def get_lengths(self, rows: NDArray[np.int64] | slice) -> NDArray[np.int32]:
        """Return the lengths of some of the sentences."""
        return self.lengths[rows]

    def pad(self, rows: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """Return some of the sentences, int64 [len(rows), width], padded on the right; none may exceed the width."""
        columns = np.arange(width)
        inside = columns < self.lengths[rows, None]
        batch = np.full(inside.shape, PADDING, np.int64)
        batch[inside] = self.tokens[(self.starts[rows, None] + columns)[inside]]
        return batch

    @classmethod
    def pack(cls, sentences: Sequence[Sequence[int]], vocabulary_size: int) -> "Sentences":
        """Copy sentences without END into one array, and add END to each."""
        lengths = np.array([len(sentence) + 1 for sentence in sentences], np.int32)
        flat = chain.from_iterable(chain(sentence, (END,)) for sentence in sentences)
        tokens = np.fromiter(flat, choose_token_type(vocabulary_size), count=int(lengths.sum(dtype=np.int64)))
        return Sentences(tokens, find_starts(lengths), lengths)

    @classmethod
    def join(cls, parts: Sequence["Sentences"]) -> "Sentences":
        """Copy sentences of several arrays into one."""
        tokens = np.concatenate([part.tokens for part in parts])
        firsts = find_starts(np.array([len(part.tokens) for part in parts]))
        starts = np.concatenate([part.starts + first for part, first in zip(parts, firsts, strict=True)])
        return Sentences(tokens, starts, np.concatenate([part.lengths for part in parts]))


def choose_token_type(vocabulary_size: int) -> np.dtype[Any]:
    """Return the smallest type of two or four bytes that holds the ids of a vocabulary."""
    return np.dtype(np.uint16 if vocabulary_size <= 1 << 16 else np.int32)


def find_starts(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the starts of sentences that follow each other."""
    return np.cumsum(lengths, dtype=np.int64) - lengths
