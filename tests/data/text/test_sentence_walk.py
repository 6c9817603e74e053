"""Walks through the pairs of each language, and how often each language is drawn."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe._compat.fairseq import import_fairseq
from gpipe.data import sampling_probabilities
from gpipe.data.text import sentence_walk
from gpipe.data.text.sentence_walk import SentenceWalk

SIZES = [1_000_000_000, 25_000_000, 744, 60]


def walk(num_pairs: list[int], draws: list[float], seed: int = 0) -> SentenceWalk:
    return SentenceWalk(np.array(num_pairs), np.array(draws), seed)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.floats(0.1, 30), st.integers(0, 99))
def test_no_pair_comes_again_before_all_others_have_come(num_pairs: int, draws: float, seed: int) -> None:
    epochs = [walk([num_pairs], [draws], seed).draw(epoch, epoch + 1)[0] for epoch in range(20)]
    steps = np.concatenate(epochs)
    for start in range(0, len(steps) - num_pairs, num_pairs):  # the walk begins at the first pair of a pass
        assert sorted(steps[start : start + num_pairs]) == list(range(num_pairs))
    assert abs(len(steps) - 20 * draws) <= 1
    assert all(abs(len(epoch) - draws) < 1 for epoch in epochs)


def test_passes_languages_and_seeds_have_orders_of_their_own() -> None:
    first, second = walk([50, 50], [100.0, 100.0]).draw(0, 1)
    (other, _) = walk([50, 50], [100.0, 100.0], seed=1).draw(0, 1)
    for one, another in ((first, second), (first, other), (first[:50], first[50:])):
        assert not np.array_equal(one, another)
    assert np.array_equal(walk([50, 50], [100.0, 100.0]).draw(0, 1)[0], first)


def test_a_stretch_that_ends_later_walks_on_into_the_next_one() -> None:
    stretched = walk([7], [10.0]).draw(3, 4.5)[0]
    assert np.array_equal(
        stretched, np.concatenate([walk([7], [10.0]).draw(3, 4)[0], walk([7], [10.0]).draw(4, 5)[0][:5]])
    )


def test_a_language_that_is_never_drawn_has_no_steps() -> None:
    assert len(walk([0, 3], [0.0, 2.0]).draw(5, 6)[0]) == 0


@pytest.mark.parametrize("num_pairs", [1, 2, 3, 4, 5, 16, 17, 100])
def test_a_large_language_is_walked_in_blocks_which_differ_from_pass_to_pass(
    num_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentence_walk, "BLOCK_SIZE", 4)
    passes = [walk([num_pairs], [float(num_pairs)]).draw(number, number + 1)[0] for number in range(6)]
    shifted = 0
    for steps in passes:
        assert sorted(steps) == list(range(num_pairs))
        blocks = [steps[start : start + 4] for start in range(0, num_pairs, 4)]
        for block in blocks:
            neighbours = {int(row - min(block)) % num_pairs for row in block}
            assert neighbours == set(range(len(block))) or num_pairs - 1 in block  # or round the end of the text
        shifted += any(int(min(block)) % 4 for block in blocks)
    assert num_pairs < 6 or shifted
    assert num_pairs < 5 or len({tuple(steps) for steps in passes}) == 6


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 70), st.lists(st.floats(0, 3), min_size=2, max_size=6).map(sorted), st.integers(0, 9))
def test_stretches_that_meet_are_one(num_pairs: int, places: list[float], seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentence_walk, "BLOCK_SIZE", 4)
        each = walk([num_pairs], [num_pairs * 1.3], seed)
        parts = [each.draw(*ends)[0] for ends in pairwise(places)]
        assert np.array_equal(np.concatenate(parts), each.draw(places[0], places[-1])[0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1 / 0.7, 5.0, 100.0])
def test_probabilities_are_those_of_fairseq(temperature: float) -> None:
    sampling = import_fairseq("fairseq.data.multilingual.sampling_method")
    ratios = np.array(sampling.make_temperature_sampling(temperature)(SIZES))
    np.testing.assert_allclose(sampling_probabilities(SIZES, temperature), ratios / ratios.sum(), rtol=1e-12)


def test_the_papers_rule_is_a_temperature_of_one_over_0_7() -> None:
    shares = np.array(SIZES) / sum(SIZES)
    np.testing.assert_allclose(sampling_probabilities(SIZES, 1 / 0.7), shares**0.7 / (shares**0.7).sum(), rtol=1e-12)


def test_a_cold_draw_of_very_unequal_languages_does_not_underflow() -> None:
    assert sampling_probabilities([10**9, 1], 0.01).tolist() == [1.0, 0.0]
