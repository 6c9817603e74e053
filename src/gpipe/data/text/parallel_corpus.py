"""Sentence pairs as token ids, by language, as the loader reads them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from gpipe.data.text.sentences import Sentences

TARGET_LANGUAGE = "en"
_SUBSET = 0x9A125  # keeps the choice of a subset apart from other random data


@dataclass
class Skipped:
    """Counts the pairs that were left out of a corpus for one reason, and notes the first.

    Attributes:
        reason: continues "skipped 3 pairs ".
        number: the number of pairs.
        first: the place of the first pair, such as "train.de-en.de:17".
    """

    reason: str
    number: int = 0
    first: str = ""

    def add(self, number: int, first: str) -> None:
        """Count more pairs, the first of them at the place `first`."""
        self.first = self.first if self.number else first
        self.number += number


class LanguagePairs:
    """The pairs of one language: sentence i of `targets` translates sentence i of `sources`."""

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
        """Whether the token ids are in memory; otherwise they are in a mapped file."""
        return self.sources.is_in_memory

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.sources)

    @cached_property
    def num_tokens(self) -> int:
        """The tokens of the longer side, summed over the pairs."""
        return int(self._count_longer_side().sum(dtype=np.int64))

    @cached_property
    def longest(self) -> int:
        """The length of the longest sentence, on either side."""
        return int(self._count_longer_side().max(initial=0))

    def select(self, rows: NDArray[np.int64] | slice) -> "LanguagePairs":
        """Return some of the pairs."""
        return LanguagePairs(self.sources.select(rows), self.targets.select(rows))

    def prefetch(self, rows: NDArray[np.int64]) -> None:
        """Prepare to read these pairs soon; only `CachedPairs` needs to."""

    @classmethod
    def join(cls, parts: "Sequence[LanguagePairs]") -> "LanguagePairs":
        """Concatenate pairs that are in memory."""
        return LanguagePairs(
            Sentences.join([part.sources for part in parts]), Sentences.join([part.targets for part in parts])
        )

    def _count_longer_side(self) -> NDArray[np.int32]:
        everything = slice(None)
        return np.maximum(self.sources.get_lengths(everything), self.targets.get_lengths(everything))


class ParallelCorpus:
    """One split of a corpus of several languages with one target language.

    Pairs are numbered from 0, language by language.

    Args:
        pairs: language -> its pairs, at least one each.
        vocabulary_size: the size of the vocabulary that both sides share.
        skipped: the pairs that were left out.
        max_pairs: the most pairs of each language. A smaller number keeps a subset of what a larger one keeps. The
            choice briefly takes eight bytes per pair of the language.

    Raises:
        ValueError: there is no language.

    Attributes:
        languages: the sorted names.
    """

    def __init__(
        self,
        pairs: Mapping[str, LanguagePairs],
        vocabulary_size: int,
        skipped: Sequence[Skipped] = (),
        max_pairs: int | None = None,
    ) -> None:
        if not pairs:
            raise ValueError("the corpus has no language: give at least one")
        self.languages = tuple(sorted(pairs))
        self.vocabulary_size = vocabulary_size
        self._skipped = [each for each in skipped if each.number]
        self._pairs = [_subset(pairs[language], max_pairs) for language in self.languages]
        self._firsts = np.cumsum([0, *map(len, self._pairs)])
        self._blocks = self._pairs
        if all(each.is_in_memory for each in self._pairs):
            # One array for all languages: a mini-batch is one read, and the tokens are stored only once.
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
        """Return the number of tokens of each language, counting the longer side of each pair."""
        return np.array([pairs.num_tokens for pairs in self._pairs])

    def longest(self) -> NDArray[np.int64]:
        """Return the length of the longest sentence of each language, on either side."""
        return np.array([pairs.longest for pairs in self._pairs])

    def pairs(self, language: str) -> LanguagePairs:
        """Return the pairs of a language.

        Raises:
            ValueError: the corpus does not have the language.
        """
        if language not in self.languages:
            raise ValueError(f"no language {language!r} in this corpus: it has {list_some(self.languages)}")
        return self._pairs[self.languages.index(language)]

    def pair(self, language: str, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (source ids, target ids) of one pair, int64, END included."""
        pairs = self.pairs(language)
        return pairs.sources[index], pairs.targets[index]

    def language_numbers(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index into `languages` of each of these pairs."""
        return np.searchsorted(self._firsts, numbers, side="right") - 1

    def pad_sources(self, numbers: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """Return the sources of pairs by their numbers, int64 [len(numbers), width], padded on the right."""
        return self._pad(numbers, width, attrgetter("sources"))

    def pad_targets(self, numbers: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """Return the targets of pairs, like `pad_sources`."""
        return self._pad(numbers, width, attrgetter("targets"))

    def warnings(self) -> list[str]:
        """Return one sentence per reason why pairs were left out."""
        return [f"skipped {each.number:,} pairs {each.reason}, the first at {each.first}" for each in self._skipped]

    def _pad(
        self, numbers: NDArray[np.int64], width: int, get_side: Callable[[LanguagePairs], Sentences]
    ) -> NDArray[np.int64]:
        batch = np.empty((len(numbers), width), np.int64)
        blocks = np.searchsorted(self._block_firsts, numbers, side="right") - 1
        for block in np.unique(blocks):
            here = blocks == block
            batch[here] = get_side(self._blocks[block]).pad(numbers[here] - self._block_firsts[block], width)
        return batch


def _subset(pairs: LanguagePairs, max_pairs: int | None) -> LanguagePairs:
    if max_pairs is None or max_pairs >= len(pairs):
        return pairs
    order = np.random.default_rng([_SUBSET, len(pairs)]).permutation(len(pairs))
    return pairs.select(np.sort(order[:max_pairs]))


def list_some(names: Sequence[str], most: int = 8) -> str:
    """Return the first names and, if there are more, their total number."""
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[:most])}, ... ({len(names)} in all)"
