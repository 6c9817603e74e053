"""The one stated test behind every verdict: a paired bootstrap whose 95 % interval excludes zero.

A gain compares two trainings of the same seed; it is positive if it agrees with the claim. Seeds are drawn with
replacement; if a gain covers several languages, so are languages. A pair stays together. The interval is the mean gain
+- t * sqrt(n / (n - 1)) * (standard error over the draws), with Student's t for n - 1 degrees of freedom. Here n is the
number of seeds, or of languages if there are fewer. We do not use the bootstrap's percentiles: they never reach beyond
the seeds, so three seeds exclude zero whenever they agree, one time in four by chance. Without an effect, this interval
excludes zero at most one time in twenty (tests/reproductions/test_verdict.py): over seeds alone as often as that, but
far less often where languages differ more than seeds, since the fewest things set the degrees of freedom.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, isinf, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

CONFIDENCE = 0.95
NUM_DRAWS = 10_000
NO_DIFFERENCE = "no difference found"
ONE_SEED = "one seed has no interval"


@dataclass(frozen=True)
class Interval:
    """A mean gain and its 95 % interval; with only one seed, its ends are infinite."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Whether the interval shows the claim, its opposite, or neither; one seed has no interval."""
        if isinf(self.low):
            return ONE_SEED
        if self.low > 0:
            return "reproduced"
        return "contradicted" if self.high < 0 else NO_DIFFERENCE

    def describe(self, form: str) -> str:
        """Write the verdict and the interval that it follows from, such as "reproduced [+0.1, +0.3]"."""
        if isinf(self.low):
            return ONE_SEED
        return f"{self.verdict} [{self.low:+{form}}, {self.high:+{form}}]"


def over_seeds(gains: Sequence[float]) -> Interval | None:
    """Return the interval of gains, one per seed; None without any."""
    return over_seeds_and_parts({seed: {"": gain} for seed, gain in enumerate(gains)})


def over_seeds_and_parts(gains: Mapping[int, Mapping[str, float]]) -> Interval | None:
    """Return the interval of gains by seed and part, such as a language; None without any.

    Seeds and parts are drawn independently of each other. A part that a seed lacks is left out of its draws.
    """
    seeds = [seed for seed, parts in gains.items() if parts]
    names = sorted({name for parts in gains.values() for name in parts})
    if not seeds:
        return None
    table = np.array([[gains[seed].get(name, np.nan) for name in names] for seed in seeds])
    is_there = (~np.isnan(table)).astype(np.float64)
    values = np.nan_to_num(table)
    seed_counts, part_counts = draw_counts(len(seeds), len(names), num_draws=NUM_DRAWS)
    draws = sum_weighted(seed_counts, values, part_counts) / np.maximum(
        sum_weighted(seed_counts, is_there, part_counts), 1
    )
    return make_interval(float(values.sum() / is_there.sum()), float(draws.std()), count_fewest(seeds, names))


def count_fewest(seeds: Sequence[int], parts: Sequence[str]) -> int:
    """Return the number of the things that fewest were drawn of: of seeds, or of several parts if there are fewer."""
    return min(len(seeds), len(parts)) if len(parts) > 1 else len(seeds)


def over_runs_and_images(accuracies: Sequence[float], num_images: int, at_least: float) -> Interval | None:
    """Return the interval of how far the accuracies of runs are above a number without runs.

    Runs are drawn with replacement, and so are the test images of each run: a binomial number of right answers. The
    interval of a single run is that of its images.
    """
    if not accuracies:
        return None
    (counts,) = draw_counts(len(accuracies), num_draws=NUM_DRAWS)
    right = (
        np.random.RandomState(1).binomial(num_images, np.asarray(accuracies), size=(NUM_DRAWS, len(accuracies)))
        / num_images
    )
    error = float((counts * right).sum(axis=1).std() / len(accuracies))
    gain = float(np.mean(accuracies)) - at_least
    if len(accuracies) > 1:
        return make_interval(gain, error, len(accuracies))
    reach = error * float(ndtri((1 + CONFIDENCE) / 2))
    return Interval(gain, gain - reach, gain + reach)


def make_interval(mean: float, error: float, number: int) -> Interval:
    """Return the interval from the standard error over draws of `number` things."""
    if number == 1:
        return Interval(mean, -inf, inf)
    quantile = float(stdtrit(number - 1, (1 + CONFIDENCE) / 2))
    reach = quantile * sqrt(number / (number - 1)) * error
    return Interval(mean, mean - reach, mean + reach)


@cache
def draw_counts(*numbers: int, num_draws: int) -> list[NDArray[np.float64]]:
    """Return for several numbers of things how often each thing is in each draw: [num_draws, number] each."""
    # A RandomState, unlike a Generator, draws the same numbers in every version of numpy, so pages stay the same.
    random = np.random.RandomState(0)
    return [random.multinomial(number, [1 / number] * number, num_draws).astype(np.float64) for number in numbers]


def sum_weighted(
    rows: NDArray[np.float64], table: NDArray[np.float64], columns: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the sum of the table over each draw of rows and columns: [NUM_DRAWS]."""
    total: NDArray[np.float64] = ((rows @ table) * columns).sum(axis=1)
    return total
