"""What fits, and what would."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.planning.accelerator import Speed, find_accelerator
from gpipe.planning.cut import Cutter
from gpipe.planning.evaluation import Evaluation, EvaluationPlanner
from gpipe.planning.exact_cut import partition_layers
from gpipe.planning.interpolation import KnownProfiles
from gpipe.planning.planner import Planner, find_largest_size
from gpipe.planning.profile import LayerProfile
from gpipe.planning.step import Setting
from tests.planning.small_profiles import LOSS, layer, with_quiet_peak

NUM_LAYERS = 8


def profiler(size: int) -> list[LayerProfile]:
    """Describe layers that keep as much as there are examples, and refuse a single one, as a batch norm may."""
    if size == 1:
        raise ValueError("Layer 0 (Cell) cannot be described")
    return [*[layer(parameter_bytes=1_000, kept=100 * size, flops=size)] * NUM_LAYERS, LOSS]


def planner(memory_bytes: int, batch_size: int = 16) -> Planner:
    accelerator = replace(find_accelerator("h100"), memory_bytes=memory_bytes)

    def cut(profiles: Sequence[LayerProfile], setting: Setting, _: Evaluation | None) -> list[int]:
        return partition_layers([1.0] * (len(profiles) - 1), setting.num_stages)

    return Planner(profiler, cut, batch_size, accelerator, Speed(10.0, 10.0, 1e12, 1e3))


def test_what_fits_and_what_would() -> None:
    setting = Setting(2, 4)
    needs = planner(0).peak_bytes(setting)
    assert planner(needs).fits(setting) and not planner(needs - 1).fits(setting)
    assert planner(needs - 1).remedies(setting) == ["K = 3", "M = 8"]


def test_what_would_fit_may_keep_other_graphs() -> None:
    setting = Setting(2, 4, (1, 1))
    found = planner(planner(0).peak_bytes(Setting(2, 4)) - 1)
    assert not found.fits(setting) and found.remedies(setting) == ["K = 3", "M = 8"]


@pytest.mark.parametrize(("schedule", "per_device"), [("gpipe", 1), ("interleaved_1f1b", 2)])
def test_a_model_that_no_cut_brings_within_the_limit_does_not_fit(schedule: str, per_device: int) -> None:
    setting = Setting(2 * per_device, 4, schedule=schedule, stages_per_device=per_device)
    speed = Speed(10.0, 10.0, 1e12, 1e3)
    found = replace(planner(10**9), cut=Cutter("flops", "max", speed))
    needs = found.peak_bytes(setting)
    for limit in (needs, needs - 1):
        limited = replace(found, cut=Cutter("flops", "max", speed, memory_limit_bytes=limit))
        assert limited.fits(setting) == (limit == needs)


def test_a_remedy_that_does_not_exist_is_not_named() -> None:
    setting = Setting(2, 4)
    assert planner(10).remedies(setting) == []
    least = min(planner(0).peak_bytes(Setting(count, 4)) for count in range(3, NUM_LAYERS + 1))
    assert planner(least).remedies(setting) == [f"K = {NUM_LAYERS}"]  # M = 16 would leave single examples


@given(least=st.integers(1, 16), together=st.booleans(), num_replicas=st.sampled_from([1, 2, 4]))
def test_batch_norm_gets_its_examples(least: int, together: bool, num_replicas: int) -> None:
    free = planner(10**9)
    bound = replace(free, min_microbatch_size=least)
    for num_microbatches in (1, 2, 4):
        setting = Setting(
            4 // num_replicas, num_microbatches, num_replicas=num_replicas, synchronize_batch_norm=together
        )
        size = 16 // num_replicas // num_microbatches
        if size * (num_replicas if together else 1) < least:
            assert bound.find_microbatch_size(setting) is None
            with pytest.raises(ValueError, match=rf"^micro-batches of \d+ examples, expected at least {least} for"):
                bound.plan(setting)
        elif size > 1:
            assert bound.find_microbatch_size(setting) == size
            assert bound.plan(setting).step_seconds == free.plan(setting).step_seconds


def test_shorter_examples_make_all_micro_batches_of_the_setting_and_are_as_much_work() -> None:
    """Four of the greatest length have the memory of a step, and eight shorter ones its bubble."""
    fixed = replace(planner(10**9, batch_size=4), profiler=lambda _: profiler(2))
    longest, asked = fixed.plan(Setting(2, 4)), Setting(2, 8)
    found = replace(fixed, varies_in_length=True).plan(asked)
    assert fixed.plan(asked).setting.num_microbatches == 4, "other examples are as long as each other"
    assert (found.setting, found.microbatch_size, found.batch_size) == (asked, 1, 4)
    assert (found.memory, found.stages) == (longest.memory, longest.stages)
    assert len(found.timeline.events) == 2 * len(longest.timeline.events)
    busy = [sum(event.end - event.start for event in plan.timeline.events) for plan in (found, longest)]
    assert busy[0] == pytest.approx(busy[1])
    assert found.bubble is not None and longest.bubble is not None and found.bubble < longest.bubble
    assert found.utilization * found.step_seconds == pytest.approx(longest.utilization * longest.step_seconds)


def test_shorter_examples_take_as_long_to_travel_as_the_longest() -> None:
    """Ten bytes per longest example, at five per second: eight seconds forward for four of them, and eight back."""
    speed = Speed(1e12, 1e12, 1e12, 5.0)
    found = replace(planner(10**9, batch_size=4), profiler=lambda _: profiler(2), speed=speed, varies_in_length=True)
    for num_microbatches in (4, 8):
        plan = found.plan(Setting(2, num_microbatches, "never"))
        assert plan.timeline.makespan_seconds == pytest.approx(16, rel=1e-6)


def test_micro_batches_that_free_no_memory_are_not_looked_for() -> None:
    sizes = []

    def parameters_alone(size: int) -> list[LayerProfile]:
        sizes.append(size)
        return [*[layer(parameter_bytes=1_000, kept=0, flops=size)] * NUM_LAYERS, LOSS]

    found = replace(planner(10, batch_size=2**20), profiler=parameters_alone)
    assert found.remedies(Setting(NUM_LAYERS, 4)) == []
    assert len(sizes) == 3  # of the setting, of twice M, and of four times M, which is no better


@pytest.mark.parametrize("batch_size", [64, 2])
def test_more_micro_batches_are_named_where_an_evaluation_alone_needs_less_with_them(batch_size: int) -> None:
    """A training step may have fewer examples than that, and then makes fewer."""

    def parameters_alone(size: int) -> list[LayerProfile]:
        return [*[layer(parameter_bytes=1_000, kept=0, flops=size)] * NUM_LAYERS, LOSS]

    def metrics(size: int) -> list[LayerProfile]:
        return [*[layer()] * NUM_LAYERS, with_quiet_peak(LOSS, 1_000 * size)]

    setting = Setting(NUM_LAYERS, 1)
    trains = replace(planner(10_000, batch_size), profiler=parameters_alone)
    found = replace(trains, evaluation=EvaluationPlanner(metrics, batch_size=64))
    assert trains.fits(setting) and not found.fits(setting)
    assert found.remedies(setting) == ["M = 8"]  # 8 examples, and inputs of 10 bytes


def test_a_search_for_micro_batches_describes_the_layers_with_two_sizes() -> None:
    sizes = []

    def noting(size: int) -> list[LayerProfile]:
        sizes.append(size)
        return profiler(size)

    found = replace(planner(100_000, batch_size=2**14), profiler=KnownProfiles(noting, estimates=True))
    assert found.remedies(Setting(NUM_LAYERS, 2)) == ["M = 32"]
    assert sizes == [2**13, 1, 2]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^num_partitions is 9, but 8 layers can make from 1 to 8 non-empty"):
        planner(1).plan(Setting(9, 4))


@given(st.integers(0, 300), st.integers(1, 20), st.integers(1, 7))
def test_the_largest_size_is_found(limit: int, start: int, step: int) -> None:
    sizes = [size for size in range(start, 400, step) if size <= limit]
    assert find_largest_size(lambda size: size <= limit, start, step) == (sizes[-1] if sizes else None)


def test_a_search_without_an_end_of_its_own_ends_where_it_is_told_to() -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return True

    assert find_largest_size(fits, 3, 3, most=100) == 3 + 64 * 3 and max(asked) == 3 + 64 * 3
