"""Cutting by tokens: against a loop that adds one sentence at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe.data.text.translation_loader import cut_by_tokens, fill_last

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=80).map(sorted)


def cut_one_by_one(lengths: list[int], batch_size: int) -> list[tuple[int, int]]:
    bounds = [(0, 0)]
    for index, length in enumerate(lengths):
        start = bounds[-1][0]
        if (index + 1 - start) * length > batch_size:
            bounds.append((index, index))
            start = index
        bounds[-1] = (start, index + 1)
    return bounds


def test_the_runs_of_the_docstring() -> None:
    lengths = np.array([1, 1, 2, 2, 2, 3, 4, 4, 5, 7, 7, 9], np.int32)
    assert cut_by_tokens(lengths, 18) == [(0, 6), (6, 9), (9, 11), (11, 12)]


@settings(deadline=None, derandomize=True)
@given(LENGTHS, st.integers(30, 200))
def test_each_run_is_as_long_as_it_may_be(lengths: list[int], batch_size: int) -> None:
    assert cut_by_tokens(np.array(lengths, np.int32), batch_size) == cut_one_by_one(lengths, batch_size)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(LENGTHS, st.integers(1, 5), st.integers(0, 60))
def test_the_last_run_gets_enough_sentences_or_there_is_no_way(lengths: list[int], least: int, spare: int) -> None:
    batch_size = least * lengths[-1] + spare
    bounds = cut_by_tokens(np.array(lengths, np.int32), batch_size)
    last, last_two = (bounds[-1][1] - start for start in (bounds[-1][0], bounds[-2:][0][0]))
    if last < least and last_two < 2 * least:
        with pytest.raises(ValueError, match=f"the last {last_two} sentences make no mini-batches of at least {least}"):
            fill_last(bounds, least)
        return
    filled = fill_last(bounds, least)
    assert [index for start, end in filled for index in range(start, end)] == list(range(len(lengths)))
    assert all(end - start >= least and (end - start) * lengths[end - 1] <= batch_size for start, end in filled)


def test_too_few_sentences_for_the_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match="the last 3 sentences make no mini-batches of at least 2, one per replica"):
        fill_last([(0, 2), (2, 3)], 2)
