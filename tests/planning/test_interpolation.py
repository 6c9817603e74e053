"""Profiles of sizes that nobody described: between two others, and exactly where three are on a line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.planning.interpolation import InterpolatedProfiles
from gpipe.planning.ledger import Work
from gpipe.planning.profile import LayerProfile
from tests.planning.small_profiles import LOSS, layer


def test_profiles_between_two_sizes_lie_on_a_line() -> None:
    asked = []

    def profiler(size: int) -> list[LayerProfile]:
        asked.append(size)
        if size == 1:
            raise ValueError("too few examples for batch norm")
        return [layer(parameter_bytes=8, kept=3 + 10 * size, flops=7 * size), LOSS]

    profiles = InterpolatedProfiles(profiler, (1, 2, 4, 16))
    assert profiles(4) == [
        replace(layer(parameter_bytes=8, kept=43, flops=28), deferred_bytes=profiles(4)[0].deferred_bytes),
        LOSS,
    ]
    assert asked == [1, 2, 16]
    with pytest.raises(ValueError, match="too few examples"):
        profiles(1)
    assert profiles(32)[0].kept_bytes == 323  # in earnest


def test_a_loss_in_more_pieces_is_interpolated_as_one_operation() -> None:
    def profiler(size: int) -> list[LayerProfile]:
        return [layer(flops=7 * size), replace(LOSS, forward=(Work(0, 100),) * size, backward=(Work(2, 50),) * size)]

    profiles = InterpolatedProfiles(profiler, (2, 4, 16))
    assert profiles(4)[1] == replace(LOSS, forward=(Work(0, 400),), backward=(Work(8, 200),))
    assert profiles(4)[0] == profiler(4)[0]


@given(
    st.lists(st.tuples(st.integers(0, 10**16), st.integers(0, 10**16)), min_size=1, max_size=3),
    st.lists(st.integers(1, 20), min_size=1, max_size=8),
)
def test_what_is_exact_is_what_describing_returns(sums: list[tuple[int, int]], sizes: list[int]) -> None:
    """A peak is the largest of sums that grow with the size in straight lines, which meet somewhere."""

    def profiler(size: int) -> list[LayerProfile]:
        peak = max(start + grows * size for start, grows in sums)
        return [replace(layer(flops=7 * size), forward_peak_bytes=peak), LOSS]

    profiles = InterpolatedProfiles(profiler, (1, 20))
    for size in sizes:
        assert profiles.exactly(size) == profiler(size)
        profiles(size)  # what was interpolated is not taken for exact


def test_three_sizes_on_a_line_are_enough() -> None:
    asked: list[int] = []

    def profiler(size: int) -> list[LayerProfile]:
        asked.append(size)
        return [layer(kept=3 + 10 * size, flops=7 * size), LOSS]

    profiles = InterpolatedProfiles(profiler, (1, 2, 4, 8, 16))
    found = [profiles.exactly(size) for size in (4, 2, 8, 4)]
    assert asked == [1, 16, 4]
    assert found == [profiler(size) for size in (4, 2, 8, 4)]
