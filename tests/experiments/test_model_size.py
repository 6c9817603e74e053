"""The study of model sizes: the search for a learning rate."""

from hypothesis import given
from hypothesis import strategies as st

from experiments.model_size import FIRST_RATE, RATES, search_rate
from gpipe.records import Record, make_record


@given(st.lists(st.integers(0, 3), min_size=len(RATES), max_size=len(RATES)))
def test_the_search_ends_at_a_rate_that_beats_both_neighbours_and_tries_none_twice(scores: list[int]) -> None:
    tried: list[float] = []

    def try_rate(rate: float) -> Record:
        tried.append(rate)
        results = {"evaluation": {"valid": {"top1": scores[RATES.index(rate)]}}}
        return make_record(kind="measured", command="c", experiment="e", config={}, seed=0, results=results)

    best, runs = search_rate(try_rate)
    place = RATES.index(best)
    near = range(max(place - 1, 0), min(place + 2, len(RATES)))
    assert tried[0] == FIRST_RATE
    assert len(tried) == len(set(tried)) == len(runs)
    assert {RATES[i] for i in near} <= set(tried)
    assert scores[place] == max(scores[RATES.index(rate)] for rate in tried)
    assert best == next(rate for rate in tried if scores[RATES.index(rate)] == scores[place])
