"""The search for a learning rate."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from experiments.tuning import Tuning
from gpipe.records import Record, make_record

RATES = (0.001, 0.003, 0.01, 0.03, 0.1)


@given(st.lists(st.integers(0, 3), min_size=len(RATES), max_size=len(RATES)), st.sampled_from(RATES))
def test_the_search_ends_at_a_rate_that_beats_both_neighbours_and_tries_none_twice(
    scores: list[int], first: float
) -> None:
    tried: list[float] = []

    def try_rate(rate: float) -> Record:
        tried.append(rate)
        results = {"score": scores[RATES.index(rate)]}
        return make_record(kind="measured", command="c", experiment="e", config={}, seed=0, results=results)

    tuning = Tuning("e", Path("runs"), RATES, first, lambda run: float(run.results["score"]))
    best, runs = tuning.search_rate(try_rate)
    place = RATES.index(best)
    near = range(max(place - 1, 0), min(place + 2, len(RATES)))
    assert tried[0] == first
    assert len(tried) == len(set(tried)) == len(runs)
    assert {RATES[i] for i in near} <= set(tried)
    assert scores[place] == max(scores[RATES.index(rate)] for rate in tried)
    assert best == next(rate for rate in tried if scores[RATES.index(rate)] == scores[place])
