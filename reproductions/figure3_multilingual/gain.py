"""The gain of the multilingual model against the number of training pairs, as the paper's figure 3 shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from math import log2

import numpy as np

from reproductions.verdict import Fit, Interval, tabulate

Gains = Mapping[int, Mapping[str, float]]
"""The gain of the multilingual model by seed and language, positive where it is better."""


@dataclass(frozen=True)
class Line:
    """The straight line of least squares through the gains over the logarithm of the number of pairs.

    Attributes:
        num_pairs: the fewest and the most pairs of a language, or of several that count as one.
        fit: the line's gain at one pair, and what each doubling of the pairs adds to it.
    """

    num_pairs: tuple[int, int]
    fit: Fit

    @property
    def at_one(self) -> float:
        """The line's gain at one pair."""
        return float(self.fit.coefficients[0])

    @property
    def per_doubling(self) -> float:
        """What each doubling of the pairs adds to the gain."""
        return float(self.fit.coefficients[1])

    def at(self, num_pairs: float) -> Interval:
        """Return the line's gain at a number of pairs."""
        return self.fit.interval(np.array([1.0, log2(num_pairs)]))

    @property
    def loss_per_doubling(self) -> Interval:
        """What each doubling of the pairs takes from the gain: the paper's claim is that this is positive."""
        return self.fit.interval(np.array([0.0, -1.0]))

    @property
    def change_of_sign(self) -> float | None:
        """The number of pairs at which a falling line crosses zero; None if that is no number of the languages."""
        if self.per_doubling >= 0:
            return None
        place = -self.at_one / self.per_doubling
        low, high = map(log2, self.num_pairs)
        return 2.0**place if low <= place <= high else None

    @cached_property
    def above_until(self) -> int | None:
        """The most pairs up to which the whole interval lies above zero, None if it does so nowhere."""
        low, high = self.num_pairs
        return max(takewhile(lambda pairs: self.at(pairs).low > 0, range(low, high + 1)), default=None)

    @cached_property
    def below_from(self) -> int | None:
        """The fewest pairs from which on the whole interval lies below zero, None if it does so nowhere."""
        low, high = self.num_pairs
        return min(takewhile(lambda pairs: self.at(pairs).high < 0, range(high, low - 1, -1)), default=None)


def fit_line(gains: Gains, pairs: Mapping[str, float]) -> Line | None:
    """Return the line through the gains of the languages whose pairs are known, None without two numbers of pairs."""
    known = {seed: {name: gain for name, gain in found.items() if name in pairs} for seed, found in gains.items()}
    table, names = tabulate(known)
    if len({pairs[name] for name in names}) < 2:
        return None
    places = np.log2([pairs[name] for name in names])
    ends = round(min(pairs[name] for name in names)), round(max(pairs[name] for name in names))
    return Line(ends, Fit.of(table, np.stack([np.ones(len(places)), places], axis=1)))


EDGES = (1, 100, 250, 500, 700, 1_000, 10_000)
"""Where the ranges of the table begin."""


def split_by_pairs(pairs: Mapping[str, int], languages: Sequence[str]) -> dict[str, list[str]]:
    """Return the languages by the range of their number of training pairs, the fewest first; leave out empty ranges."""
    found: dict[str, list[str]] = {}
    for low, high in zip(EDGES, (*EDGES[1:], None), strict=True):
        inside = [name for name in languages if low <= pairs[name] and (high is None or pairs[name] < high)]
        if inside:
            found[f"{low:,} and more" if high is None else f"{low:,} to {high - 1:,}"] = sorted(inside)
    return found
