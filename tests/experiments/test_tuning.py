"""The search for a learning rate."""

from hypothesis import given
from hypothesis import strategies as st

from experiments.tuning import climb

RATES = (0.001, 0.003, 0.01, 0.03, 0.1)


@given(st.lists(st.integers(0, 3), min_size=len(RATES), max_size=len(RATES)), st.sampled_from(RATES))
def test_the_search_ends_at_a_rate_that_beats_both_neighbours_and_tries_none_twice(
    scores: list[int], first: float
) -> None:
    tried: list[float] = []

    def score(rate: float) -> float:
        tried.append(rate)
        return scores[RATES.index(rate)]

    best = climb(RATES, first, score)
    place = RATES.index(best)
    near = range(max(place - 1, 0), min(place + 2, len(RATES)))
    assert tried[0] == first
    assert len(tried) == len(set(tried))
    assert {RATES[i] for i in near} <= set(tried)
    assert scores[place] == max(scores[RATES.index(rate)] for rate in tried)
    assert best == next(rate for rate in tried if scores[RATES.index(rate)] == scores[place])
