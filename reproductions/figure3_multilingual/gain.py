"""The gain of the multilingual model against the number of training pairs, as the paper's figure 3 shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from math import log2, sqrt

import numpy as np
from numpy.typing import NDArray

from reproductions import verdict
from reproductions.verdict import Interval, count_fewest, draw_counts, make_interval, sum_weighted

Gains = Mapping[int, Mapping[str, float]]
"""The gain of the multilingual model by seed and language, positive where it is better."""


@dataclass(frozen=True)
class Line:
    """The straight line of least squares through the gains over the logarithm of the number of pairs.

    The draws are those of the stated test: of seeds and of languages.

    Attributes:
        num_pairs: the fewest and the most pairs of a language.
        at_one, per_doubling: the line's gain at one pair, and what each doubling of the pairs adds to it.
        covariance: of the two over the draws, [2, 2].
        fewest: the number of seeds, or of languages if there are fewer.
    """

    num_pairs: tuple[int, int]
    at_one: float
    per_doubling: float
    covariance: NDArray[np.float64]
    fewest: int

    def at(self, num_pairs: float) -> Interval:
        """Return the line's gain at a number of pairs."""
        place = log2(num_pairs)
        return self._interval(self.at_one + place * self.per_doubling, np.array([1.0, place]))

    @property
    def loss_per_doubling(self) -> Interval:
        """What each doubling of the pairs takes from the gain: the paper's claim is that this is positive."""
        return self._interval(-self.per_doubling, np.array([0.0, 1.0]))

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

    def _interval(self, value: float, weights: NDArray[np.float64]) -> Interval:
        # A variance of zero may come out below it by rounding.
        error = sqrt(max(float(weights @ self.covariance @ weights), 0.0))
        return make_interval(value, error, self.fewest)


def fit_line(gains: Gains, pairs: Mapping[str, int]) -> Line | None:
    """Return the line through the gains of the languages whose pairs are known, None without two numbers of pairs."""
    known = {seed: {name: gain for name, gain in found.items() if name in pairs} for seed, found in gains.items()}
    seeds = [seed for seed, found in known.items() if found]
    names = sorted({name for found in known.values() for name in found})
    if len({pairs[name] for name in names}) < 2:
        return None
    table = np.array([[known[seed].get(name, np.nan) for name in names] for seed in seeds])
    places = np.log2([pairs[name] for name in names])
    every = np.ones((1, len(seeds))), np.ones((1, len(names)))
    ((at_one, per_doubling),) = _solve(table, places, *every)
    drawn = _solve(table, places, *draw_counts(len(seeds), len(names), num_draws=verdict.NUM_DRAWS))
    drawn = drawn[np.isfinite(drawn).all(axis=1)]  # a draw of languages of one number of pairs has no line
    ends = min(pairs[name] for name in names), max(pairs[name] for name in names)
    covariance = np.cov(drawn.T, bias=True) if len(drawn) else np.zeros((2, 2))
    return Line(ends, float(at_one), float(per_doubling), covariance, count_fewest(seeds, names))


def _solve(
    table: NDArray[np.float64],
    places: NDArray[np.float64],
    rows: NDArray[np.float64],
    columns: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return offset and slope of the line through the table of each draw of rows and columns: [draws, 2]."""
    is_there = (~np.isnan(table)).astype(np.float64)
    values = np.nan_to_num(table)
    number, x, xx, y, xy = (
        sum_weighted(rows, summed, columns)
        for summed in (is_there, is_there * places, is_there * places**2, values, values * places)
    )
    spread = number * xx - x**2
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(spread > 1e-9 * number * xx, (number * xy - x * y) / spread, np.nan)
        return np.stack([(y - slope * x) / number, slope], axis=1)


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
