"""LanguagePairs of sentences as token ids, by language: the sources make them, and the loader reads them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gpipe.data.text.sentences import Sentences

TARGET_LANGUAGE = "en"
_SUBSET = 0x9A125  # keeps the choice of a subset apart from other random numbers


@dataclass
class Skipped:
    """Count the pairs that were left out of a corpus for one reason, and remember the first.

    Attributes:
        reason: continues "skipped 3 pairs ".
        number: of pairs.
        first: the place of the first of them, such as "train.de-en.de:17".
    """

    reason: str
    number: int = 0
    first: str = ""

    def add(self, number: int, first: str) -> None:
        """Count more pairs; `first` is the place of the first of these."""
        self.first = self.first if self.number else first
        self.number += number


class LanguagePairs:
    """The pairs of one language: sentence i of `targets` translates sentence i of `sources`. Both end with END."""

    def __init__(self, sources: Sentences, targets: Sentences) -> None:
        self._sources, self._targets = sources, targets

    @property
    def sources(self) -> Sentences:
        """The sentences of the language."""
        return self._sources

    @property
    def targets(self) -> Sentences:
        """The same sentences in the target language."""
        return self._targets

    @property
    def is_in_memory(self) -> bool:
        """Whether the token ids are in memory, not in a mapped file."""
        return self.sources.is_in_memory

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.sources)

    @cached_property
    def num_tokens(self) -> int:
        """The sum, over the pairs, of the tokens of the longer side."""
        return int(self._longer().sum(dtype=np.int64))

    @cached_property
    def longest(self) -> int:
        """The tokens of the longest sentence of either side."""
        return int(self._longer().max(initial=0))

    def select(self, rows: NDArray[np.int64] | slice) -> "LanguagePairs":
        """Return some of the pairs."""
        return LanguagePairs(self.sources.select(rows), self.targets.select(rows))

    def prefetch(self, rows: NDArray[np.int64]) -> None:
        """Prepare to read these pairs soon. Nothing to do for pairs in memory, or scattered over a file."""

    @classmethod
    def join(cls, parts: "Sequence[LanguagePairs]") -> "LanguagePairs":
        """Concatenate pairs that are in memory."""
        return LanguagePairs(
            Sentences.join([part.sources for part in parts]), Sentences.join([part.targets for part in parts])
        )

    def _longer(self) -> NDArray[np.int32]:
        everything = slice(None)
        return np.maximum(self.sources.lengths_of(everything), self.targets.lengths_of(everything))


class ParallelCorpus:
    """Hold one split of a corpus of several languages with one target language.

    LanguagePairs are numbered from 0 on, language after language.

    Args:
        pairs: language -> its pairs, at least one each.
        vocabulary_size: of both sides together.
        skipped: what was left out.
        max_pairs: keep that many pairs of each language; a smaller number keeps a subset of what a larger one keeps.
            Choosing them briefly takes eight bytes per pair of the language.

    Raises:
        ValueError: there is no language.

    Attributes:
        languages: their names, sorted.
    """

    def __init__(
        self,
        pairs: Mapping[str, LanguagePairs],
        vocabulary_size: int,
        skipped: Sequence[Skipped] = (),
        max_pairs: int | None = None,
    ) -> None:
        if not pairs:
            raise ValueError("a corpus without a language: expected at least one")
        self.languages = tuple(sorted(pairs))
        self.vocabulary_size = vocabulary_size
        self._skipped = [each for each in skipped if each.number]
        self._pairs = [_subset(pairs[language], max_pairs) for language in self.languages]
        self._firsts = np.cumsum([0, *map(len, self._pairs)])
        self._blocks = self._pairs
        if all(each.is_in_memory for each in self._pairs):
            # One array for all languages: a mini-batch is read at once, and the tokens need not be kept twice.
            whole = LanguagePairs.join(self._pairs)
            self._blocks = [whole]
            self._pairs = [whole.select(slice(*ends)) for ends in pairwise(self._firsts)]
        self._block_firsts = np.cumsum([0, *map(len, self._blocks)])

    def __len__(self) -> int:
        """Return the number of pairs of all languages."""
        return int(self._firsts[-1])

    @property
    def firsts(self) -> NDArray[np.int64]:
        """The number of the first pair of each language, in the order of `languages`."""
        return self._firsts[:-1]

    def num_pairs(self) -> NDArray[np.int64]:
        """Return the number of pairs of each language, in the order of `languages`."""
        return np.diff(self._firsts)

    def num_tokens(self) -> NDArray[np.int64]:
        """Return the tokens of each language, of the longer side of each pair."""
        return np.array([pairs.num_tokens for pairs in self._pairs])

    def longest(self) -> NDArray[np.int64]:
        """Return the tokens of the longest sentence of each language, of either side."""
        return np.array([pairs.longest for pairs in self._pairs])

    def pairs(self, language: str) -> LanguagePairs:
        """Return the pairs of a language. Raises ValueError for one that is not in the corpus."""
        if language not in self.languages:
            raise ValueError(f"no language {language!r} in this corpus: it has {list_some(self.languages)}")
        return self._pairs[self.languages.index(language)]

    def pair(self, language: str, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (source ids, target ids) of one pair, int64, END included."""
        pairs = self.pairs(language)
        return pairs.sources[index], pairs.targets[index]

    def language_numbers(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place in `languages` of the language of each of these pairs."""
        return np.searchsorted(self._firsts, numbers, side="right") - 1

    def padded_sources(self, numbers: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """Return the sources of pairs by their numbers, int64 [len(numbers), width], filled up with PADDING."""
        batch = np.empty((len(numbers), width), np.int64)
        for here, pairs, rows in self._split_by_block(numbers):
            batch[here] = pairs.sources.padded(rows, width)
        return batch

    def padded_targets(self, numbers: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """Return the targets of pairs by their numbers, as `padded_sources` does the sources."""
        batch = np.empty((len(numbers), width), np.int64)
        for here, pairs, rows in self._split_by_block(numbers):
            batch[here] = pairs.targets.padded(rows, width)
        return batch

    def warnings(self) -> list[str]:
        """Return a sentence for each reason why something was left out."""
        return [f"skipped {each.number:,} pairs {each.reason}, the first at {each.first}" for each in self._skipped]

    def _split_by_block(
        self, numbers: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.bool_], LanguagePairs, NDArray[np.int64]]]:
        """Yield for each block of arrays which of the pairs it holds, the block, and their rows in it."""
        blocks = np.searchsorted(self._block_firsts, numbers, side="right") - 1
        for block in np.unique(blocks):
            here = blocks == block
            yield here, self._blocks[block], numbers[here] - self._block_firsts[block]


def _subset(pairs: LanguagePairs, max_pairs: int | None) -> LanguagePairs:
    if max_pairs is None or max_pairs >= len(pairs):
        return pairs
    order = np.random.default_rng([_SUBSET, len(pairs)]).permutation(len(pairs))
    return pairs.select(np.sort(order[:max_pairs]))


def list_some(names: Sequence[str], most: int = 8) -> str:
    """Return the first names, and how many there are where that is not all of them."""
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[:most])}, ... ({len(names)} in all)"
