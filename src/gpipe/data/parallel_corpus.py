"""Pairs of sentences as token ids, by language: what the sources make and the loader reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gpipe.data.sentences import Sentences

_SUBSET = 0x9A125  # keeps the choice of a subset apart from other random numbers


@dataclass
class Skipped:
    """Count what was left out of a corpus for one reason, and remember the first of it.

    reason: continues "skipped 3 pairs ". first: where it is, such as "train.de-en.de:17".
    """

    reason: str
    number: int = 0
    first: str = ""

    def add(self, number: int, first: str) -> None:
        """Count some more; `first` is where the first of them is."""
        self.first = self.first if self.number else first
        self.number += number


@dataclass(frozen=True)
class LanguagePairs:
    """Hold the pairs of one language: sentence i of sources means sentence i of targets. Both end with END."""

    sources: Sentences
    targets: Sentences

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.sources)

    def longest(self) -> NDArray[np.int32]:
        """Return the length of the longer side of each pair, in tokens with END."""
        return np.maximum(self.sources.lengths, self.targets.lengths)

    def select(self, rows: NDArray[np.int64] | slice) -> "LanguagePairs":
        """Return some of the pairs."""
        return LanguagePairs(self.sources.select(rows), self.targets.select(rows))


class ParallelCorpus:
    """Hold one split of a corpus of several languages with one target language.

    pairs: language -> its pairs, at least one each. vocabulary_size: of both sides together. skipped: what was left
    out. max_pairs: keep so many pairs of each language; of a smaller number the pairs are also among those of a larger
    one.

    languages: sorted. blocks: all pairs, language after language, in as few arrays as possible.

    Raises ValueError where there is no language.
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
        self.blocks = [_join(self._pairs)] if all(map(_in_memory, self._pairs)) else self._pairs
        bounds = np.cumsum([0, *map(len, self._pairs)])
        if len(self.blocks) == 1:  # the tokens that were joined need not be kept twice
            self._pairs = [self.blocks[0].select(slice(*ends)) for ends in pairwise(bounds)]

    def __len__(self) -> int:
        """Return the number of pairs of all languages."""
        return sum(map(len, self._pairs))

    def num_pairs(self) -> NDArray[np.int64]:
        """Return the number of pairs of each language, in the order of `languages`."""
        return np.array([len(pairs) for pairs in self._pairs])

    def pairs(self, language: str) -> LanguagePairs:
        """Return the pairs of a language. Raises ValueError for one that is not in the corpus."""
        if language not in self.languages:
            raise ValueError(f"no language {language!r} in this corpus: it has {some_of(self.languages)}")
        return self._pairs[self.languages.index(language)]

    def pair(self, language: str, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (source ids, target ids) of one pair, int64, END included."""
        pairs = self.pairs(language)
        return pairs.sources[index], pairs.targets[index]

    def warnings(self) -> list[str]:
        """Return a sentence for each reason why something was left out."""
        return [f"skipped {each.number:,} pairs {each.reason}, the first at {each.first}" for each in self._skipped]


def _in_memory(pairs: LanguagePairs) -> bool:
    return pairs.sources.owner is None and pairs.targets.owner is None


def _join(parts: Sequence[LanguagePairs]) -> LanguagePairs:
    sources = Sentences.join([part.sources for part in parts])
    return LanguagePairs(sources, Sentences.join([part.targets for part in parts]))


def _subset(pairs: LanguagePairs, max_pairs: int | None) -> LanguagePairs:
    if max_pairs is None or max_pairs >= len(pairs):
        return pairs
    order = np.random.default_rng([_SUBSET, len(pairs)]).permutation(len(pairs))
    return pairs.select(np.sort(order[:max_pairs]))


def some_of(names: Sequence[str], most: int = 8) -> str:
    """Return the first names, and how many there are where that is not all of them."""
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[:most])}, ... ({len(names)} in all)"
