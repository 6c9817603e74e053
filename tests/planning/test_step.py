"""Forecasts of steps, beside formulas."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.pipeline.schedule import Rematerialize
from gpipe.planning.accelerator import DEVICES, Device, find_device
from gpipe.planning.step import Setting, forecast, plan_memory
from gpipe.planning.ledger import Work
from gpipe.planning.speed import Speed
from tests.planning.small_profiles import LOSS, layer

UNIT = Speed(
    peak_flops_per_second=2_000.0, flops_per_second=1_000.0, bytes_per_second=1e12, link_bytes_per_second=float("inf")
)


@given(st.integers(1, 6), st.integers(1, 12))
def test_equal_stages_take_what_the_formula_says(num_stages: int, num_microbatches: int) -> None:
    """With F = R = 1 and B = 2 seconds: the recomputation of all stages but the last hides in the wait at first."""
    profiles = [*[layer()] * num_stages, LOSS]
    setting = Setting(num_stages, num_microbatches)
    found = forecast(profiles, UNIT.seconds(profiles), [1] * num_stages, setting, UNIT)
    expected = 4 * num_microbatches + 3 * (num_stages - 1)
    assert found.timeline.makespan_seconds == pytest.approx(expected, rel=1e-6)
    flops = 3_000 * num_stages * num_microbatches
    assert found.utilization == pytest.approx(flops / (found.step_seconds * num_stages * 2_000), rel=1e-6)


def test_an_operation_is_bound_by_arithmetic_or_by_memory() -> None:
    speed = Speed(10.0, 5.0, 100.0, 1.0)
    profile = replace(LOSS, forward=(Work(50, 100), Work(5, 1000)), backward=(Work(0, 200),))
    assert speed.seconds([profile, profile]) == [(10.0 + 10.0, 10.0 + 10.0, 2.0)] * 2


def test_boundaries_take_time_both_ways() -> None:
    profiles = [layer(), layer(), LOSS]
    slow = replace(UNIT, link_bytes_per_second=5.0)
    setting = Setting(2, 1, Rematerialize.NEVER)
    found = forecast(profiles, slow.seconds(profiles), [1, 1], setting, slow)
    assert [stage.transfer_seconds for stage in found.stages] == [2.0, 0.0]
    assert found.timeline.makespan_seconds == pytest.approx(1 + 2 + 1 + 2 + 2 + 2, rel=1e-6)


def test_replicas_average_their_gradients() -> None:
    profiles = [layer(4_000), LOSS]
    slow = replace(UNIT, link_bytes_per_second=1_000.0)
    setting = Setting(1, 2, num_replicas=4)
    found = forecast(profiles, slow.seconds(profiles), [1], setting, slow)
    assert found.averaging_seconds == pytest.approx(2 * 3 / 4 * 4)
    assert setting.num_devices == 4


def test_a_recomputation_needs_the_statistics_of_all_replicas_until_then() -> None:
    profiles = [replace(layer(), statistics_bytes=7), LOSS]
    added = {}
    for mode, num_replicas in product(Rematerialize, (1, 2)):
        settings = [Setting(1, 4, mode, num_replicas=num_replicas, synchronize_batch_norm=on) for on in (False, True)]
        alone, together = (plan_memory(profiles, [1], setting)[0].activation_bytes for setting in settings)
        added[mode.value, num_replicas] = together - alone
    # The peak is the first backward: three of the four micro-batches are yet to be recomputed.
    assert {key: bytes_ for key, bytes_ in added.items() if bytes_} == {("always", 2): 21, ("except_last", 2): 21}


def test_interleaved_stages_share_devices() -> None:
    profiles = [*[layer(4_000)] * 4, LOSS]
    setting = Setting(4, 4, schedule="interleaved_1f1b", stages_per_device=2)
    found = forecast(profiles, UNIT.seconds(profiles), [1] * 4, setting, UNIT)
    assert len(found.memory) == 2
    assert [memory.gradient_bytes for memory in found.memory] == [8_000, 8_000]


def test_1f1b_holds_fewer_micro_batches_than_gpipe() -> None:
    profiles = [*[layer(kept=1000)] * 4, LOSS]
    stashes = {
        schedule: [memory.stash_bytes for memory in plan_memory(profiles, [1] * 4, Setting(4, 16, schedule=schedule))]
        for schedule in ("gpipe", "1f1b")
    }
    assert stashes == {"gpipe": [160, 160, 160, 160], "1f1b": [160, 30, 20, 10]}  # the first holds the mini-batch


def test_the_optimisers_state_counts_with_the_parameters() -> None:
    profiles = [layer(4_000), LOSS]
    weights_gradients_and = {
        ratio: plan_memory(profiles, [1], Setting(1, 2, state_ratio=ratio))[0].parameter_bytes for ratio in (0, 1, 3)
    }
    assert weights_gradients_and == {0: 8_000, 1: 12_000, 3: 20_000}


def test_devices_are_found_by_name() -> None:
    assert find_device("tpu_v2").memory_bytes == 8 * 2**30
    assert list(DEVICES) == ["tpu_v2", "tpu_v3", "p40", "p100", "v100", "a100", "h100", "h200"]
    for device in DEVICES.values():
        assert isinstance(device, Device) and device.bfloat16_flops >= device.float32_flops


def test_an_unknown_device_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"^device is tpu_v9, expected one of tpu_v2, .*, h200: set device=") as caught:
        find_device("tpu_v9")
    assert "\n" not in str(caught.value)


def test_a_device_may_have_other_figures() -> None:
    device = find_device("h100").with_limits(memory_gib=40, link_gb_per_second=6)
    assert (device.memory_bytes, device.link_bandwidth) == (40 * 2**30, 6e9)
    assert find_device("h100").with_limits(memory_gib=None, link_gb_per_second=None) == find_device("h100")
