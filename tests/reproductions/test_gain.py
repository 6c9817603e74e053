"""The gain against the number of training pairs: the line, its interval, and where its sign changes."""

import numpy as np
import pytest

from reproductions.figure3_multilingual.gain import fit_line, split_by_pairs

PAIRS = {"a": 32, "b": 64, "c": 128, "d": 256, "e": 512}


def falling(seed: int, noise: float = 0.0) -> dict[str, float]:
    """A gain of 3 at 32 pairs, which loses 1.5 with each doubling: zero at 128 pairs."""
    random = np.random.RandomState(seed)
    return {name: 3.0 - 1.5 * place + noise * random.randn() for place, name in enumerate(PAIRS)}


def test_the_line_is_that_of_least_squares_over_the_logarithm_of_the_pairs() -> None:
    gains = {seed: falling(seed, noise=1.0) for seed in range(3)}
    del gains[1]["b"]  # which this seed lacks
    line = fit_line(gains, PAIRS)
    points = [(np.log2(PAIRS[name]), value) for found in gains.values() for name, value in found.items()]
    slope, offset = np.polyfit(*zip(*points, strict=True), deg=1)
    assert line is not None
    assert (line.per_doubling, line.at_one) == (pytest.approx(slope), pytest.approx(offset))
    assert line.change_of_sign == pytest.approx(2 ** (-offset / slope))


def test_gains_on_a_line_have_an_interval_without_width_and_change_sign_where_the_line_does() -> None:
    line = fit_line({seed: falling(0) for seed in range(3)}, PAIRS)
    assert line is not None and line.change_of_sign == pytest.approx(128)
    assert (line.at(32).low, line.at(32).high) == (pytest.approx(3.0, abs=1e-3), pytest.approx(3.0, abs=1e-3))
    assert line.above_until in (127, 128) and line.below_from in (128, 129)
    assert line.loss_per_doubling.verdict == "reproduced"


def test_seeds_that_differ_widen_the_interval_as_the_stated_test_does() -> None:
    gains = {seed: {name: value + shift for name, value in falling(0).items()} for seed, shift in enumerate((-2, 0, 2))}
    line = fit_line(gains, PAIRS)
    assert line is not None and line.change_of_sign == pytest.approx(128)
    assert line.at(128).verdict == line.at(64).verdict == "no difference found"
    # Student's interval of the three shifts, whatever the languages.
    assert line.at(128).high == pytest.approx(4.303 * 2 / np.sqrt(3), rel=0.02)
    assert line.loss_per_doubling.verdict == "reproduced", "seeds shift the line and do not turn it"


def test_a_gain_that_rises_changes_no_sign_and_one_number_of_pairs_has_no_line() -> None:
    rising = {seed: {name: -value for name, value in falling(0).items()} for seed in range(2)}
    line = fit_line(rising, PAIRS)
    assert line is not None and line.change_of_sign is None and line.loss_per_doubling.verdict == "contradicted"
    above = fit_line({seed: {name: 9 + gain for name, gain in falling(0).items()} for seed in range(2)}, PAIRS)
    assert above is not None and above.change_of_sign is None and above.above_until == 512 and above.below_from is None
    assert fit_line({0: {"a": 1.0}}, PAIRS) is None and fit_line({}, PAIRS) is None


def test_one_seed_has_no_interval_anywhere_on_the_line() -> None:
    line = fit_line({0: falling(0)}, PAIRS)
    assert line is not None and line.at(64).verdict == "one seed has no interval"
    assert line.above_until is None and line.below_from is None


def test_languages_are_split_by_their_pairs_and_empty_ranges_are_left_out() -> None:
    assert split_by_pairs({**PAIRS, "f": 20_000}, [*PAIRS, "f"]) == {
        "1 to 99": ["a", "b"],
        "100 to 249": ["c"],
        "250 to 499": ["d"],
        "500 to 699": ["e"],
        "10,000 and more": ["f"],
    }
