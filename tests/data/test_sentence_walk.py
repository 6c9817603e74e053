"""The walk through the pairs: no repeats, and a function of seed and epoch."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe.data.sentence_walk import SentenceWalk


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
    assert np.array_equal(stretched, np.concatenate([walk([7], [10.0]).draw(3, 4)[0], walk([7], [10.0]).draw(4, 5)[0][:5]]))


def test_a_language_that_is_never_drawn_has_no_steps() -> None:
    assert len(walk([0, 3], [0.0, 2.0]).draw(5, 6)[0]) == 0
