"""Sentence pairs as token ids, by language, as the loader reads them."""

from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gpipe.data.location import check_known
from gpipe.data.text.sentences import Sentences

TARGET_LANGUAGE = "en"
_SUBSET = 0x9A125  # keeps the choice of a subset apart from other random data


class Skipped(dict[str, tuple[int, str]]):
    """Counts the pairs that were left out, by reason: reason -> (their number, the place of the first).

    A reason continues "skipped 3 pairs ". A place is such as "train.de-en.de:17".
    """

    def add(self, reason: str, number: int, first: str) -> None:
        """Count more pairs, the first of them at the place `first`."""
        if number:
            before, place = self.get(reason, (0, first))
            self[reason] = before + number, place

    def merge(self, other: "Skipped") -> None:
        """Count the pairs of another block or language, which come after these."""
        for reason, (number, first) in other.items():
            self.add(reason, number, first)


class LanguagePairs:
    """The pairs of one language: sentence i of `targets` translates sentence i of `sources`."""

    def __init__(self, sources: Sentences, targets: Sentences, skipped: Skipped | None = None) -> None:
        self.sources, self.targets, self.skipped = sources, targets, skipped or Skipped()

    def __len__(self) -> int:
        return len(self.sources)

    @cached_property
    def num_tokens(self) -> int:
        """The tokens of the longer side, summed over the pairs."""
        return int(self._count_longer_side().sum(dtype=np.int64))

    @cached_property
    def longest(self) -> int:
        """The length of the longest sentence, on either side."""
        return int(self._count_longer_side().max(initial=0))

    def select(self, rows: NDArray[np.int64] | slice, skipped: Skipped | None = None) -> "LanguagePairs":
        """Return some of the pairs; `skipped` counts others."""
        return LanguagePairs(self.sources.select(rows), self.targets.select(rows), skipped)

    def prefetch(self, rows: NDArray[np.int64]) -> None:
        """Prepare to read these pairs soon; only `CachedPairs` needs to."""

    def _count_longer_side(self) -> NDArray[np.int32]:
        return np.maximum(self.sources.get_lengths(slice(None)), self.targets.get_lengths(slice(None)))


class ParallelCorpus:
    """One split of a corpus of several languages with one target language.

    Pairs are numbered from 0, language by language.

    Args:
        pairs: language -> its pairs, at least one each.
        vocabulary_size: the size of the vocabulary that both sides share.
        max_pairs: the most pairs of each language. A smaller number keeps a subset of what a larger one keeps. The
            choice briefly takes eight bytes per pair of the language.

    Attributes:
        languages: the sorted names.
    """

    def __init__(self, pairs: Mapping[str, LanguagePairs], vocabulary_size: int, max_pairs: int | None = None) -> None:
        self.languages = tuple(sorted(pairs))
        self.vocabulary_size = vocabulary_size
        self._skipped = Skipped()
        for language in pairs.values():
            self._skipped.merge(language.skipped)
        self._pairs = [_subset(pairs[language], max_pairs) for language in self.languages]
        self._firsts = np.cumsum([0, *map(len, self._pairs)])
        self._whole: LanguagePairs | None = None
        if pairs and all(type(each) is LanguagePairs for each in pairs.values()):
            # In memory, a mini-batch is one read instead of one per language.
            sources, targets = zip(*((each.sources, each.targets) for each in self._pairs), strict=True)
            self._whole = LanguagePairs(Sentences.join(sources), Sentences.join(targets))
            self._pairs = [self._whole.select(slice(*ends)) for ends in pairwise(self._firsts)]

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
        """Return the pairs of a language."""
        check_known("language", language, self.languages)
        return self._pairs[self.languages.index(language)]

    def pair(self, language: str, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (source ids, target ids) of one pair, int64, END included."""
        pairs = self.pairs(language)
        return pairs.sources[index], pairs.targets[index]

    def language_numbers(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index into `languages` of each of these pairs."""
        return np.searchsorted(self._firsts, numbers, side="right") - 1

    def warnings(self) -> list[str]:
        """Return one sentence per reason why pairs were left out."""
        return [
            f"skipped {number:,} pairs {reason}, the first at {first}"
            for reason, (number, first) in self._skipped.items()
        ]

    def pad(self, side: str, numbers: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """Return a side ("sources", "targets") of pairs by number, int64 [len(numbers), width], padded on the right."""
        if self._whole is not None:
            return np.asarray(getattr(self._whole, side).pad(numbers, width))
        batch = np.empty((len(numbers), width), np.int64)
        languages = self.language_numbers(numbers)
        for language in np.unique(languages):
            rows = languages == language
            sentences: Sentences = getattr(self._pairs[language], side)
            batch[rows] = sentences.pad(numbers[rows] - self._firsts[language], width)
        return batch


def _subset(pairs: LanguagePairs, max_pairs: int | None) -> LanguagePairs:
    if max_pairs is None or max_pairs >= len(pairs):
        return pairs
    order = np.random.default_rng([_SUBSET, len(pairs)]).permutation(len(pairs))
    return pairs.select(np.sort(order[:max_pairs]))
