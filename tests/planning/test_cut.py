"""Partitions by memory, beside all that there are."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.pipeline.schedule import Rematerialize
from gpipe.planning.cut import partition_by_memory
from gpipe.planning.step import Setting, plan_memory
from gpipe.planning.profile import LayerProfile
from tests.planning.small_profiles import LOSS, layer

KIB = 2**10
LAYERS = st.builds(layer, st.integers(0, 500).map(lambda n: n * KIB), st.integers(10, 500).map(lambda n: n * KIB))


def peak(profiles: list[LayerProfile], partitions: list[int], setting: Setting) -> int:
    return max(memory.peak_bytes for memory in plan_memory(profiles, partitions, setting))


@given(st.lists(LAYERS, min_size=3, max_size=8), st.integers(1, 3), st.sampled_from(["gpipe", "1f1b"]))
def test_no_other_partition_has_a_lower_peak(layers: list[LayerProfile], num_stages: int, schedule: str) -> None:
    profiles = [*layers, LOSS]
    setting = Setting(num_stages, 4, Rematerialize.ALWAYS, schedule)
    found = partition_by_memory(profiles, setting)
    assert sum(found) == len(layers) and len(found) == num_stages and min(found) >= 1
    inner = combinations(range(1, len(layers)), num_stages - 1)
    every = ([end - start for start, end in pairwise([0, *cuts, len(layers)])] for cuts in inner)
    best = min(peak(profiles, partitions, setting) for partitions in every)
    assert best <= peak(profiles, found, setting) <= best + 64 * KIB  # the step of its search


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^num_stages is 3, but the model has 2 layers: choose at most as many.$"):
        partition_by_memory([layer(), layer(), LOSS], Setting(3, 4))


def test_interleaved_stages_are_refused() -> None:
    setting = Setting(2, 4, schedule="interleaved_1f1b", stages_per_device=2)
    with pytest.raises(ValueError, match=r"^partition_by is memory with 2 stages a device, which it cannot balance"):
        partition_by_memory([layer(), layer(), LOSS], setting)
