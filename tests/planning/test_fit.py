"""What `fit` keeps is within the memory, and one graph more is not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe.pipeline.schedule import Rematerialize
from gpipe.planning.fit import Fit
from gpipe.planning.step import Setting, plan_memory, settle
from tests.planning.small_profiles import LOSS, layer

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "split_gpipe": 1, "zb_h1": 1, "zb_v": 2}
MOST = 4  # micro-batches


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(SCHEDULES)),
    st.integers(1, 2),
    st.lists(st.integers(1, 30), min_size=4, max_size=6),
    st.integers(0, 10_000),
    st.integers(1, MOST),
)
def test_one_graph_more_is_more_than_there_is_memory_for(
    schedule: str, num_devices: int, kept: list[int], memory_bytes: int, num_microbatches: int
) -> None:
    num_stages = num_devices * SCHEDULES[schedule]
    profiles = [*[layer(parameter_bytes=40, kept=100 * size) for size in kept], LOSS]
    cut = [1] * (num_stages - 1) + [len(kept) - num_stages + 1]
    setting = Setting(num_stages, num_microbatches, Fit(memory_bytes), schedule, SCHEDULES[schedule])

    def peaks(counts: tuple[int, ...] | Rematerialize) -> list[int]:
        return [memory.peak_bytes for memory in plan_memory(profiles, cut, replace(setting, rematerialize=counts))]

    least, found = peaks(Rematerialize.ALWAYS), settle(profiles, cut, setting).rematerialize
    assert not isinstance(found, Fit)
    for own, fewest in zip(peaks(found), least, strict=True):
        assert own <= memory_bytes or own == fewest  # which is all that can be done
    counts = {"always": (0,) * num_stages, "never": (num_microbatches,) * num_stages}.get(str(found), found)
    if isinstance(counts, Rematerialize):  # except_last keeps what costs nothing
        return
    for stage, device in enumerate(setting.placement):
        raised = tuple(count + (other == stage) for other, count in enumerate(counts))
        if peaks(raised)[device] <= memory_bytes:
            assert replace(setting, rematerialize=raised).tasks == replace(setting, rematerialize=counts).tasks


def test_the_more_memory_the_fewer_recomputations() -> None:
    profiles = [*[layer(parameter_bytes=40, kept=1_000)] * 4, LOSS]
    setting = Setting(2, 8)
    numbers = []
    for memory_bytes in range(1_000, 20_000, 500):
        settled = settle(profiles, [2, 2], replace(setting, rematerialize=Fit(memory_bytes)))
        numbers.append(sum(task.kind == "recompute" for task in itertools.chain(*settled.tasks)))
    assert numbers == sorted(numbers, reverse=True) and len(set(numbers)) > 4 and numbers[0] == 16 and numbers[-1] == 0


@pytest.mark.parametrize("mode", Rematerialize)
def test_a_mode_stays_as_it_is(mode: Rematerialize) -> None:
    setting = Setting(1, 2, mode)
    assert settle([layer(), LOSS], [1], setting) is setting
