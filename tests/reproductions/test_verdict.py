"""A verdict follows from an interval that chance excludes zero from one time in twenty."""

from math import inf, sqrt

import numpy as np
import pytest
from scipy import stats

from reproductions.claims import Claim, count_intervals, describe_chance, format_verdicts, verdicts_table
from reproductions.verdict import Interval, over_runs_and_images, over_seeds, over_seeds_and_parts
from tests.reproductions.translation_records import cells


@pytest.mark.parametrize("gains", [(1.0, 2.0, 4.0), (-3.0, -2.5, -2.0, -2.2, -2.1)])
def test_over_seeds_it_is_students_interval(gains: tuple[float, ...]) -> None:
    # The standard error over all draws is s / sqrt(n) * sqrt((n - 1) / n): what remains is the t-test's interval.
    found = over_seeds(gains)
    expected = stats.t.interval(0.95, len(gains) - 1, np.mean(gains), np.std(gains, ddof=1) / sqrt(len(gains)))
    assert found is not None and found.mean == pytest.approx(np.mean(gains))
    assert (found.low, found.high) == pytest.approx(expected, rel=0.02)


def test_three_seeds_that_agree_by_chance_are_no_verdict() -> None:
    found = over_seeds([0.1, 0.9, 2.0])
    assert found is not None and found.verdict == "no difference found" and found.low < 0
    alike = over_seeds([0.9, 1.0, 1.1])
    assert alike is not None and alike.verdict == "reproduced"
    worse = over_seeds([-0.9, -1.0, -1.1])
    assert worse is not None and worse.verdict == "contradicted"


def test_one_seed_decides_nothing() -> None:
    found = over_seeds([5.0])
    assert found == Interval(5.0, -inf, inf)
    assert found.verdict == found.describe(".1f") == "one seed has no interval"
    assert over_seeds([]) is None and over_seeds_and_parts({0: {}}) is None


def test_the_interval_stands_beside_the_verdict() -> None:
    assert Interval(0.2, 0.1, 0.3).describe(".2f") == "reproduced [+0.10, +0.30]"
    assert Interval(0.2, -0.1, 0.5).describe(".1%") == "no difference found [-10.0%, +50.0%]"


@pytest.mark.parametrize(("num_seeds", "num_parts"), [(3, 1), (6, 1), (3, 30), (6, 3)])
@pytest.mark.parametrize("between_seeds", [0.0, 1.0], ids=["seeds alike", "seeds differ"])
def test_without_an_effect_at_most_one_experiment_in_twenty_has_a_verdict(
    num_seeds: int, num_parts: int, between_seeds: float
) -> None:
    random = np.random.RandomState(1)
    num_experiments, decided = 2000, 0
    for _ in range(num_experiments):
        table = random.randn(num_seeds, num_parts) + between_seeds * random.randn(num_seeds, 1)
        table += random.randn(1, num_parts) if num_parts > 1 else 0
        gains = {seed: {str(part): value for part, value in enumerate(row)} for seed, row in enumerate(table)}
        found = over_seeds_and_parts(gains)
        decided += found is not None and found.verdict != "no difference found"
    # Five in a hundred, and three standard deviations of this number of experiments; a test that never decides is none.
    assert 0.01 <= decided / num_experiments <= 0.05 + 3 * sqrt(0.05 * 0.95 / num_experiments)


def test_languages_that_differ_widen_the_interval() -> None:
    alike = over_seeds_and_parts({seed: {"a": 1.0, "b": 1.0, "c": 1.0} for seed in range(3)})
    apart = over_seeds_and_parts({seed: {"a": -1.0, "b": 1.0, "c": 3.0} for seed in range(3)})
    assert alike is not None and apart is not None and alike.mean == apart.mean == 1.0
    assert alike.verdict == "reproduced" and apart.verdict == "no difference found"


def test_a_language_that_a_seed_lacks_is_left_out() -> None:
    found = over_seeds_and_parts({0: {"a": 1.0, "b": 3.0}, 1: {"a": 2.0}})
    assert found is not None and found.mean == 2.0


def test_one_run_is_judged_by_its_test_images() -> None:
    found = over_runs_and_images([0.84], 50_000, 0.839)
    error = sqrt(0.84 * 0.16 / 50_000)
    assert found is not None and found.verdict == "no difference found"
    assert (found.low, found.high) == pytest.approx((0.001 - 1.96 * error, 0.001 + 1.96 * error), abs=error / 20)
    better = over_runs_and_images([0.85], 50_000, 0.839)
    assert better is not None and better.verdict == "reproduced"
    assert over_runs_and_images([], 100, 0.5) is None


def test_runs_that_differ_widen_the_interval_of_an_accuracy() -> None:
    alike = over_runs_and_images([0.9] * 5, 10_000, 0.88)
    apart = over_runs_and_images([0.8, 0.85, 0.9, 0.95, 1.0], 10_000, 0.88)
    assert alike is not None and apart is not None
    assert alike.verdict == "reproduced" and apart.verdict == "no difference found"


@pytest.mark.parametrize("num_runs", [2, 5, 10])
def test_more_runs_do_not_average_out_the_chance_in_the_test_images_that_they_share(num_runs: int) -> None:
    random = np.random.RandomState(1)
    num_experiments, num_images, decided = 500, 500, 0
    for _ in range(num_experiments):
        chances = random.beta(0.225, 0.025, num_images)  # most images are right in nearly all runs, or in none
        accuracies = (random.rand(num_runs, num_images) < chances).mean(axis=1)
        found = over_runs_and_images(accuracies.tolist(), num_images, 0.9)
        decided += found is not None and found.verdict != "no difference found"
    assert decided / num_experiments <= 0.05 + 3 * sqrt(0.05 * 0.95 / num_experiments)


@pytest.mark.parametrize(
    ("intervals", "said"),
    [
        ({}, "not run"),
        ({"a": over_seeds([5.0])}, "a: one seed has no interval"),
        ({"a": over_seeds([5.0]), "b": over_seeds([4.0])}, "all 2: one seed has no interval"),
        (
            {"a": over_seeds([5.0]), "b": Interval(0.2, 0.1, 0.3), "c": over_seeds([4.0]), "d": None},
            "b: reproduced [+0.1, +0.3]; 2 others: one seed has no interval",
        ),
    ],
)
def test_what_has_one_seed_is_only_counted(intervals: dict[str, Interval | None], said: str) -> None:
    assert format_verdicts(intervals.items(), ".1f") == said


@pytest.mark.parametrize("form", [".0f", ".3f", ".2%"])
def test_the_intervals_of_the_claims_are_counted_with_the_verdicts_that_chance_may_give(form: str) -> None:
    verdicts = [
        format_verdicts([(name, Interval(0.2, low, 0.3)) for name in names], form)
        for names, low in (("abc", 0.1), ("d", -0.1), ("", 0.0))
    ]
    claims = [Claim("a claim", "1", verdict=verdict) for verdict in (*verdicts, "one seed has no interval", "K [1, 2]")]
    assert count_intervals(claims) == 4
    said = describe_chance(claims)
    assert "has 4 intervals" in said and "up to 0.2 of them would be expected to exclude zero" in said


def test_a_short_table_has_a_row_per_claim_and_counts_the_verdicts_of_all_its_scopes() -> None:
    good, bad = ({name: Interval(0.2, low, 0.3) for name in names} for names, low in (("ab", 0.1), ("c", -0.1)))
    pages = {
        "one": [
            Claim("deep beats wide", "2", "1.5", "1.6", "1.7", format_verdicts(good.items(), ".1f"), "languages"),
            Claim("deep beats wide", "2", "1.4", "1.6", "1.8", format_verdicts(bad.items(), ".1f"), "fewer languages"),
            Claim("it fits", "yes", verdict=format_verdicts(good.items(), ".1f")),
        ],
        "two": [Claim("deep beats wide", "3")],
    }
    assert cells(verdicts_table(pages.items(), "../")) == [
        ["[deep beats wide](../one)", "2", "1.5", "1.7", "reproduced 2 of 3, no difference found 1 of 3"],
        ["[it fits](../one)", "yes", "not run", "", "reproduced"],
        ["[deep beats wide](../two)", "3", "not run", "", "not run"],
    ]
