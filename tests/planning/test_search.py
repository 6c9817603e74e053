"""The fastest setting is the fastest of all: compared with every setting, cut by cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpipe.pipeline.schedule import Rematerialize
from gpipe.pipeline.schedules.choice import SCHEDULES
from gpipe.planning.accelerator import Speed, find_accelerator
from gpipe.planning.bound import bound_step
from gpipe.planning.cut import Cutter
from gpipe.planning.evaluation import EvaluationPlanner
from gpipe.planning.fit import Fit
from gpipe.planning.planner import Planner
from gpipe.planning.profile import LayerProfile
from gpipe.planning.search import Space, find_fastest
from gpipe.planning.step import Setting, plan_step
from tests.planning.small_profiles import LOSS, all_cuts, layer, with_quiet_peak

SPEED = Speed(10.0, 10.0, 1e4, 1e3, 5.0, hop_seconds=2.0, task_seconds=1.0)
STAGES_PER_DEVICE = {"interleaved_1f1b": (2, 3), "zb_v": (2,)}
LIKE = Setting(1, 1)


def planner(flops: list[int], batch_size: int, least: int = 1, evaluated: int = 0) -> Planner:
    """Return the planner of a model whose layers take so many FLOPs per example.

    Its metrics take `evaluated` bytes per example, of as many examples as a mini-batch has.
    """

    def profiler(size: int) -> list[LayerProfile]:
        return [*[layer(parameter_bytes=100 * each, kept=40 * size, flops=each * size) for each in flops], LOSS]

    def evaluation_profiler(size: int) -> list[LayerProfile]:
        return [*[layer()] * len(flops), with_quiet_peak(LOSS, evaluated * size)]

    accelerator, cut = find_accelerator("h100"), Cutter("seconds", "step", SPEED)
    found = Planner(profiler, cut, batch_size, accelerator, SPEED, 0, least)
    return replace(found, evaluation=EvaluationPlanner(evaluation_profiler, batch_size)) if evaluated else found


def list_settings(num_devices: int, batch_size: int, num_layers: int) -> Iterator[Setting]:
    """Yield every setting that the search may choose, written down again."""
    counts = [count for count in (1, 2, 4, 8, 16) if count <= batch_size]
    for num_replicas, schedule, num_microbatches in product((1, 2, 3, 4), SCHEDULES, counts):
        for per_device in STAGES_PER_DEVICE.get(schedule, (1,)):
            num_stages = num_devices // num_replicas * per_device
            divides = num_devices % num_replicas == 0 == batch_size % num_replicas
            if not divides or num_stages > num_layers or num_microbatches * num_replicas > batch_size:
                continue
            # Every stage may keep another number of graphs.
            keeps = product(range(min(num_microbatches, 2) + 1), repeat=num_stages) if num_stages <= 4 else ()
            for mode in (*Rematerialize, *keeps):
                yield Setting(num_stages, num_microbatches, mode, schedule, per_device, num_replicas=num_replicas)


def find_best(model: Planner, num_devices: int, room_bytes: int) -> float | None:
    """Return the seconds of the fastest step of all settings and cuts that fit."""
    best = None
    num_layers = len(model.profiler(1)) - 1
    for setting in list_settings(num_devices, model.batch_size, num_layers):
        profiles, seconds, setting = model.describe(setting)
        for cut in all_cuts(num_layers, setting.num_stages):
            plan = plan_step(profiles, seconds, cut, setting, SPEED)
            if model.evaluation is not None:
                plan = replace(plan, evaluation_bytes=model.evaluation.describe(setting).plan(cut, setting))
            if plan.peak_bytes <= room_bytes and (best is None or plan.step_seconds < best):
                best = plan.step_seconds
    return best


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 9), min_size=3, max_size=4),
    st.sampled_from([4, 6]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([3_000, 6_000, 12_000, 10**9]),
    st.sampled_from([0, 1_000, 3_000]),
)
@example([1, 1, 1], 4, 1, 3_000, 1_000)  # only smaller micro-batches than the fastest leave room for an evaluation
@example([3, 1, 2, 5], 6, 2, 6_000, 1_000)
def test_no_setting_and_no_cut_is_faster(
    flops: list[int], batch_size: int, num_devices: int, room_bytes: int, evaluated: int
) -> None:
    model = planner(flops, batch_size, evaluated=evaluated)
    found = find_fastest(model, Space(num_devices), LIKE, room_bytes, most_cuts=1)
    best = find_best(model, num_devices, room_bytes)
    if best is None:
        assert found == []
        return
    assert found[0].step_seconds <= best * (1 + 1e-12)
    assert all(plan.peak_bytes <= room_bytes for plan in found)
    assert all(plan.setting.num_devices == num_devices for plan in found)


def test_no_setting_is_faster_for_examples_that_vary_in_length() -> None:
    """Four of the longest examples leave stages idle that 32 micro-batches of shorter ones do not."""
    model = planner([3] * 8, 4)
    speed = replace(SPEED, operation_seconds=0.0, hop_seconds=0.0, task_seconds=0.0)
    model = replace(model, cut=Cutter("seconds", "step", speed), speed=speed, varies_in_length=True)
    space = Space(8, num_microbatches=32, rematerialize=Rematerialize.NEVER)
    every = [model.plan(one) for one in space.settings(4, LIKE, 10**9) if one.num_stages <= 8]
    assert find_fastest(model, space, LIKE, 10**9)[0].step_seconds == min(plan.step_seconds for plan in every)


def test_the_best_of_each_shape_come_in_the_order_of_their_steps() -> None:
    found = find_fastest(planner([3, 1, 2, 5, 2, 2], 16), Space(4), LIKE, 10**9)
    assert len(found) == 5
    assert [plan.step_seconds for plan in found] == sorted(plan.step_seconds for plan in found)
    shapes = [(p.setting.num_replicas, p.setting.num_stages, p.setting.schedule) for p in found]
    assert len(set(shapes)) == 5


def test_what_is_raised_before_a_plan_ends_the_search() -> None:
    planned = 0

    def stop_at_the_third() -> None:
        nonlocal planned
        planned += 1
        if planned == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_fastest(planner([3, 1, 2, 5, 2, 2], 16), Space(4), LIKE, 10**9, on_plan=stop_at_the_third)
    assert planned == 3


FIXED: list[dict[str, Any]] = [
    {"num_stages": 2},
    {"num_microbatches": 3},
    {"schedule": "gpipe"},
    {"stages_per_device": 2},
    {"num_replicas": 2},
    {"rematerialize": Rematerialize.ALWAYS},
    {"schedule": "zb_h1", "num_stages": 1},
]


@pytest.mark.parametrize("fixed", FIXED, ids=str)
def test_what_is_fixed_stays(fixed: dict[str, Any]) -> None:
    num_devices = 1 if fixed.get("num_stages") == 1 else 4
    found = find_fastest(planner([3, 1, 2, 5, 2, 2], 12), Space(num_devices, **fixed), LIKE, 10**9)
    assert found
    for plan in found:
        assert {key: getattr(plan.setting, key) for key in fixed} == fixed


@pytest.mark.parametrize("fixed", [{"num_stages": 10}, {"stages_per_device": 5}], ids=str)
def test_what_is_fixed_may_be_more_than_is_tried_without_it(fixed: dict[str, Any]) -> None:
    found = {(one.num_stages, one.stages_per_device) for one in Space(2, **fixed).settings(8, LIKE, 10**9)}
    assert found == {(10, 5)}


def test_micro_batches_leave_batch_norm_its_examples() -> None:
    found = find_fastest(planner([3, 1, 2, 5], 16, least=4), Space(2), LIKE, 10**9)
    assert found and all(plan.microbatch_size >= 4 for plan in found)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=4, max_size=6),
    st.sampled_from(list(SCHEDULES)),
    st.integers(1, 4),
    st.sampled_from([*Rematerialize, Fit(10**9)]),
    st.integers(1, 2),
    st.sampled_from([{"state_ratio": 2.0}, {"shared_ratio": 2.0, "num_replicas": 2}]),
)
def test_no_cut_beats_the_bound(
    flops: list[int],
    schedule: str,
    num_microbatches: int,
    mode: Rematerialize | Fit,
    num_devices: int,
    ratios: dict[str, Any],
) -> None:
    per_device = STAGES_PER_DEVICE.get(schedule, (1,))[0]
    model = planner(flops, 8)
    setting = Setting(num_devices * per_device, num_microbatches, mode, schedule, per_device, **ratios)
    profiles, seconds, setting = model.describe(setting)
    bound = bound_step(profiles, seconds, setting, SPEED)
    plans = [plan_step(profiles, seconds, cut, setting, SPEED) for cut in all_cuts(len(flops), setting.num_stages)]
    assert bound <= min(plan.step_seconds for plan in plans) * (1 + 1e-9)


def test_sizes_that_are_shown_are_profiled_once_and_others_are_not() -> None:
    """A profile of a large model takes seconds."""
    model = planner([3, 4, 3, 5, 4, 4], 64)
    profiler, asked = model.profiler, list[int]()

    def ask(size: int) -> list[LayerProfile]:
        asked.append(size)
        return profiler(size)

    plans = find_fastest(replace(model, profiler=ask), Space(4), LIKE, 10**6)
    ends = [1, 64]
    assert sorted(asked) == sorted([*ends, *{plan.microbatch_size for plan in plans}])
