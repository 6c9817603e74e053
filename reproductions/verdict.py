"""The one stated test behind every verdict: a 95 % interval of a paired gain that excludes zero.

A gain compares two trainings of the same seed; it is positive if it agrees with the claim. Over seeds alone, the
interval is Student's. If a gain covers several languages, both seeds and languages are treated as random samples. The
squared half-widths of Student's intervals for the means per seed and for the means per language are added. That of the
single gains is subtracted, because both contain it. The interval is never narrower than either of the two. A line
through the gains of several languages is treated in the same way, with its deviations in place of those from the mean.

Without an effect, this interval excludes zero at most one time in twenty. It comes closest to that over seeds alone,
and where seeds or languages differ most (simulated in tests/reproductions/test_verdict.py). Languages have to be
independent for that, so those with the same English lines count as one (english_lines.py). Lines that other languages
share are not treated as a random sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf, sqrt
from statistics import fmean, variance

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

CONFIDENCE = 0.95
NO_DIFFERENCE = "no difference found"
ONE_SEED = "one seed has no interval"


@dataclass(frozen=True)
class Interval:
    """A mean gain and its 95 % interval; with only one seed, its ends are infinite."""

    mean: float
    low: float
    high: float

    @classmethod
    def around(cls, mean: float, reach: float) -> "Interval":
        """Return the interval that reaches as far to both sides."""
        return cls(mean, mean - reach, mean + reach)

    @property
    def verdict(self) -> str:
        """Whether the interval shows the claim, its opposite, or neither; one seed has no interval."""
        if isinf(self.low):
            return ONE_SEED
        if self.low > 0:
            return "reproduced"
        return "contradicted" if self.high < 0 else NO_DIFFERENCE

    def describe(self, form: str, instead: str | None = None) -> str:
        """Write the verdict, or something else instead, and the interval, such as "reproduced [+0.1, +0.3]"."""
        if isinf(self.low):
            return ONE_SEED
        return f"{instead or self.verdict} [{self.low:+{form}}, {self.high:+{form}}]"


def over_seeds(gains: Sequence[float]) -> Interval | None:
    """Return the interval of gains, one per seed; None without any."""
    return over_seeds_and_parts({seed: {"": gain} for seed, gain in enumerate(gains)})


def over_seeds_and_parts(gains: Mapping[int, Mapping[str, float]]) -> Interval | None:
    """Return the interval of gains by seed and part, such as a language; None without any.

    A part that a seed lacks is left out of the mean, and has no deviation of its own.
    """
    table, names = tabulate(gains)
    return None if not names else Fit.of(table, np.ones((len(names), 1))).interval(np.ones(1))


def tabulate(gains: Mapping[int, Mapping[str, float]]) -> tuple[NDArray[np.float64], list[str]]:
    """Return gains by seed and part as a table, with NaN for a part that a seed lacks, and the parts' names."""
    rows = [parts for parts in gains.values() if parts]
    names = sorted({name for parts in rows for name in parts})
    return np.array([[parts.get(name, np.nan) for name in names] for parts in rows]), names


@dataclass(frozen=True)
class Fit:
    """A linear function of the known properties of each part, fitted to the gains of all seeds by least squares.

    Attributes:
        coefficients: [p], of the gains that are there.
        of_seeds: [seeds, p], of the gains of each seed.
        inverse: [p, parts], gives coefficients of the gains of one seed.
        of_parts: the variance of the parts' mean gains about the function.
        of_single: that of single gains about both, of the mean over the seeds.
        num_parts: how many of these are free: those that the function does not fit anyway.
    """

    coefficients: NDArray[np.floating]
    of_seeds: NDArray[np.floating]
    inverse: NDArray[np.floating]
    of_parts: float
    of_single: float
    num_parts: int

    @classmethod
    def of(cls, table: NDArray[np.float64], design: NDArray[np.float64]) -> "Fit":
        """Fit gains, [seeds, parts], by the known properties of the parts, [parts, p]."""
        is_there = ~np.isnan(table)
        rows, columns = np.nonzero(is_there)
        coefficients = np.linalg.lstsq(design[columns], table[rows, columns], rcond=None)[0]
        rest = table - design @ coefficients
        filled = np.where(is_there, rest, np.nanmean(rest, 1, keepdims=True) + np.nanmean(rest, 0) - np.nanmean(rest))
        inverse = np.linalg.pinv(design)
        of_seeds = filled @ inverse.T
        deviations = filled.mean(axis=0) - design @ of_seeds.mean(axis=0)
        single = filled - of_seeds @ design.T - deviations
        num_seeds, num_parts = len(table), len(design) - design.shape[1]
        free = max((num_seeds - 1) * num_parts - int((~is_there).sum()), 1)
        return cls(
            coefficients,
            coefficients + of_seeds,
            inverse,
            float((deviations**2).sum() / max(num_parts, 1)),
            float((single**2).sum() / free / num_seeds),
            num_parts,
        )

    def interval(self, weights: NDArray[np.float64]) -> Interval:
        """Return the interval of a weighted sum of the coefficients."""
        value, num_seeds = float(weights @ self.coefficients), len(self.of_seeds)
        if num_seeds == 1:
            return Interval(value, -inf, inf)
        seeds = student(num_seeds - 1) ** 2 * float((self.of_seeds @ weights).var(ddof=1)) / num_seeds
        if self.num_parts == 0:
            return Interval.around(value, sqrt(seeds))
        size = float(((weights @ self.inverse) ** 2).sum())
        parts = student(self.num_parts) ** 2 * self.of_parts * size
        both = student(num_seeds - 1) ** 2 * self.of_single * size
        return Interval.around(value, sqrt(max(seeds + parts - both, seeds, parts)))


def student(freedom: int) -> float:
    """Return the half-width of the 95 % interval in standard errors, with these degrees of freedom."""
    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def over_runs_and_images(accuracies: Sequence[float], num_images: int, at_least: float) -> Interval | None:
    """Return the interval of the accuracies of runs minus a number without runs.

    Runs and test images are treated as random samples. All runs have the same images, so more runs do not average out
    the chance in these. The squared half-widths over runs (Student's) and over images (binomial) are added. The
    interval of a single run is over its images.
    """
    if not accuracies:
        return None
    mean, number = fmean(accuracies), len(accuracies)
    runs = student(number - 1) ** 2 * variance(accuracies) / number if number > 1 else 0.0
    images = float(ndtri((1 + CONFIDENCE) / 2)) ** 2 * mean * (1 - mean) / num_images
    return Interval.around(mean - at_least, sqrt(runs + images))
