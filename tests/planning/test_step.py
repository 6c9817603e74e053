"""Plans of steps, beside formulas."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.pipeline.schedule import Rematerialize
from gpipe.pipeline.shared.averaging import BUCKET_BYTES
from gpipe.planning.accelerator import LayerSeconds, Speed
from gpipe.planning.evaluation import EvaluationPlanner
from gpipe.planning.step import Setting, plan_memory, plan_step
from tests.planning.small_profiles import LOSS, layer

UNIT = Speed(
    peak_flops_per_second=2_000.0, flops_per_second=1_000.0, bytes_per_second=1e12, link_bytes_per_second=float("inf")
)


@given(st.integers(1, 6), st.integers(1, 12))
def test_equal_stages_take_what_the_formula_says(num_stages: int, num_microbatches: int) -> None:
    """With F = R = 1 and B = 2 seconds: the recomputation of all stages but the last hides in the wait at first."""
    profiles = [*[layer()] * num_stages, LOSS]
    setting = Setting(num_stages, num_microbatches)
    found = plan_step(profiles, UNIT.seconds(profiles), [1] * num_stages, setting, UNIT)
    expected = 4 * num_microbatches + 3 * (num_stages - 1)
    assert found.timeline.makespan_seconds == pytest.approx(expected, rel=1e-6)
    flops = 3_000 * num_stages * num_microbatches
    assert found.utilization == pytest.approx(flops / (found.step_seconds * num_stages * 2_000), rel=1e-6)


def test_boundaries_take_time_both_ways() -> None:
    profiles = [layer(), layer(), LOSS]
    slow = replace(UNIT, link_bytes_per_second=5.0)
    setting = Setting(2, 1, Rematerialize.NEVER)
    found = plan_step(profiles, slow.seconds(profiles), [1, 1], setting, slow)
    assert [stage.transfer_seconds for stage in found.stages] == [2.0, 0.0]
    assert found.timeline.makespan_seconds == pytest.approx(1 + 2 + 1 + 2 + 2 + 2, rel=1e-6)


def test_the_engine_adds_to_each_task() -> None:
    profiles = [layer(), layer(), LOSS]
    # Between the first stage's first and last task the second one does not wait. In one process no task overlaps.
    of_two, of_one = Setting(2, 3), Setting(2, 3, Rematerialize.NEVER, is_sequential=True)
    for setting, num_tasks in ((of_two, 1 + 3 * 3 + 1), (of_one, 2 * 3 * 2)):
        plain, slow = (
            plan_step(profiles, UNIT.seconds(profiles), [1, 1], setting, replace(UNIT, task_seconds=seconds))
            for seconds in (0.0, 0.5)
        )
        added = slow.timeline.makespan_seconds - plain.timeline.makespan_seconds
        assert added == pytest.approx(0.5 * num_tasks)


def test_replicas_average_their_gradients() -> None:
    profiles = [layer(4_000), LOSS]
    slow = replace(UNIT, link_bytes_per_second=1_000.0)
    setting = Setting(1, 2, num_replicas=4)
    found = plan_step(profiles, slow.seconds(profiles), [1], setting, slow)
    assert found.averaging_seconds == pytest.approx(2 * 3 / 4 * 4)
    assert setting.num_devices == 4


@pytest.mark.parametrize("updates", [None, [0.5, 0.5]], ids=["planned", "measured"])
@pytest.mark.parametrize("kept", [2.0, 0.0], ids=["momentum", "no state"])
def test_replicas_that_share_out_the_optimiser_send_what_each_has_updated(
    updates: list[float] | None, kept: float
) -> None:
    profiles = [layer(4_000), LOSS]
    slow = replace(UNIT, link_bytes_per_second=1_000.0)
    alone, shared = (
        plan_step(profiles, slow.seconds(profiles), [1], Setting(1, 2, num_replicas=4, **ratios), slow, updates)
        for ratios in ({"state_ratio": kept}, {"state_ratio": 0.0, "shared_ratio": kept})
    )
    assert shared.memory == alone.memory, "the replica that has the only parameter keeps all of its state"
    assert shared.step_seconds - alone.step_seconds == pytest.approx(4)
    assert shared.update_seconds - alone.update_seconds == pytest.approx(4)


def test_averages_travel_while_the_stages_before_work() -> None:
    profiles = [layer(), layer(4_000), LOSS]
    slow = replace(UNIT, link_bytes_per_second=1_000.0)
    # Stage 1 ends when stage 0 has one backward left, which takes 2 s; its averages take 4 s.
    found = plan_step(profiles, UNIT.seconds(profiles), [1, 1], Setting(2, 2, num_replicas=2), slow)
    transfer = found.stages[0].transfer_seconds
    assert found.averaging_seconds == pytest.approx(4 - 2 - transfer)
    fast = replace(slow, link_bytes_per_second=4_000.0)
    found = plan_step(profiles, UNIT.seconds(profiles), [1, 1], Setting(2, 2, num_replicas=2), fast)
    assert found.averaging_seconds == 0


def test_replicas_need_the_memory_of_a_bucket() -> None:
    size = 10 * BUCKET_BYTES
    profiles = [replace(layer(size), trainable_sizes=(size // number,) * number) for number in (100, 2, 100)]
    for partitions, buckets in (([1, 2], (BUCKET_BYTES, size // 2)), ([2, 1], (size // 2, BUCKET_BYTES))):
        alone, together = (
            plan_memory([*profiles, LOSS], partitions, Setting(2, 2, num_replicas=num_replicas))
            for num_replicas in (1, 2)
        )
        added = tuple(two.activation_bytes - one.activation_bytes for one, two in zip(alone, together, strict=True))
        assert added == pytest.approx(
            buckets, abs=100
        )  # without buckets, a recomputation may take more than a backward


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
    found = plan_step(profiles, UNIT.seconds(profiles), [1] * 4, setting, UNIT)
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


def test_replicas_that_share_out_the_optimisers_state_keep_equal_parts() -> None:
    profiles = [replace(layer(4_000), trainable_sizes=(1_000,) * 4), LOSS]
    kept = [plan_memory(profiles, [1], Setting(1, 2, state_ratio=1, shared_ratio=2, num_replicas=r)) for r in (1, 2, 4)]
    assert [memory.parameter_bytes for (memory,) in kept] == [20_000, 16_000, 14_000]


@pytest.mark.parametrize("setting", [Setting(1, 2), Setting(4, 2, schedule="interleaved_1f1b", stages_per_device=2)])
@pytest.mark.parametrize(
    ("sizes", "num_replicas", "fullest"),
    [((400, 4, 4), 4, 400), ((8, 8, 8), 2, 16), ((8, 6, 4, 2), 2, 10), ((4, 4), 4, 4), ((), 2, 0)],
)
def test_of_replicas_that_share_out_whole_parameters_the_one_that_keeps_most_is_planned(
    setting: Setting, sizes: tuple[int, ...], num_replicas: int, fullest: int
) -> None:
    whole = replace(layer(sum(sizes), kept=0), trainable_sizes=sizes)
    profiles = [whole, *[layer(kept=0)] * 3, LOSS]
    setting = replace(setting, state_ratio=1, shared_ratio=2, update_ratio=100, num_replicas=num_replicas)
    partitions = [4] if setting.num_stages == 1 else [1] * 4
    found = plan_memory(profiles, partitions, setting)[0]
    assert found.parameter_bytes == 3 * sum(sizes) + 2 * fullest
    assert found.peak_bytes == found.parameter_bytes + 100 * fullest or not sizes
    evaluated = EvaluationPlanner(lambda _: profiles, 2).describe(setting).plan(partitions, setting)[0]
    assert evaluated == 2 * sum(sizes) + 2 * fullest + 2 * 10 + 20  # inputs, and a forward


def test_what_an_update_allocates_counts_where_the_step_needs_less() -> None:
    profiles = [layer(4_000, kept=1000), LOSS]
    (without,), (beside,), (most,) = (
        plan_memory(profiles, [1], Setting(1, 2, update_ratio=ratio)) for ratio in (0, 0.01, 2)
    )
    assert without.peak_bytes == beside.peak_bytes < most.peak_bytes
    assert most.peak_bytes == without.parameter_bytes + 2 * 4_000


@given(st.integers(1, 5), st.integers(1, 8), st.sampled_from(Rematerialize))
def test_one_process_does_all_tasks_one_after_the_other_and_has_no_bubble(
    num_stages: int, num_microbatches: int, mode: Rematerialize
) -> None:
    profiles = [*[layer(4_000)] * num_stages, LOSS]
    together = Setting(num_stages, num_microbatches, mode)
    seconds = UNIT.seconds(profiles)
    found = [
        plan_step(profiles, seconds, [1] * num_stages, replace(together, is_sequential=alone), UNIT)
        for alone in (False, True)
    ]
    assert found[1].timeline.makespan_seconds == pytest.approx(sum(found[0].timeline.busy_seconds()), rel=1e-6)
    assert found[1].update_seconds == pytest.approx(num_stages * found[0].update_seconds)
    assert (found[1].bubble, found[1].equal_stages_bubble) == (None, None)
    assert found[0].bubble is not None
    assert found[1].memory == found[0].memory


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (2, 1), (4, 8), (8, 32)])
def test_the_bubble_of_equal_stages_is_the_formulas_of_which_recomputation_fills_a_part(
    num_stages: int, num_microbatches: int
) -> None:
    k, m = num_stages, num_microbatches
    uneven = [*[layer(4_000)] * k, layer(40_000), LOSS]
    forward = sum(seconds.forward for seconds in UNIT.seconds(uneven))
    backward = sum(seconds.backward for seconds in UNIT.seconds(uneven))
    never, always = (
        plan_step(uneven, UNIT.seconds(uneven), [1] * (k - 1) + [2], Setting(k, m, mode), UNIT).equal_stages_bubble
        for mode in (Rematerialize.NEVER, Rematerialize.ALWAYS)
    )
    assert never == pytest.approx((k - 1) / (m + k - 1))
    # All micro-batches go forward, the last stage recomputes and goes back, and the last gradient travels back.
    waiting = (k - 1) * (forward + backward)
    assert always == pytest.approx(waiting / (waiting + m * (2 * forward + backward)))


def test_the_bubble_of_equal_interleaved_stages_is_that_of_their_devices() -> None:
    profiles = [*[layer()] * 6, LOSS]
    setting = Setting(6, 8, Rematerialize.NEVER, schedule="interleaved_1f1b", stages_per_device=3)
    found = plan_step(profiles, UNIT.seconds(profiles), [1] * 6, setting, UNIT)
    assert found.equal_stages_bubble == pytest.approx(1 / 25)


def test_a_plan_has_rows_partitions_and_sizes() -> None:
    profiles = [layer(8_000), layer(), layer(flops=4_000), LOSS]
    found = plan_step(profiles, UNIT.seconds(profiles), [2, 1], Setting(2, 4, num_replicas=2), UNIT)
    found = replace(found, batch_size=30, auxiliary_parameters=500)
    assert found.partitions == [2, 1]
    assert [(row["stage"], row["first_layer"], row["last_layer"]) for row in found.rows()] == [(0, 0, 1), (1, 2, 2)]
    assert [(stage.forward_flops, stage.flops) for stage in found.stages] == [(2_000, 6_000), (4_000, 12_000)]
    assert found.imbalance == pytest.approx(1 / 3, rel=1e-6)
    assert found.microbatch_size == 4  # 15 images of each replica in four micro-batches
    assert (found.parameters, found.evaluated_parameters) == (2_000, 1_500)


def test_recomputation_is_said_as_to_a_pipeline() -> None:
    assert Setting(2, 4, [1, 0]) == Setting(2, 4, (1, 0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^rematerialize is 'fit'; it must be one of always, except_last, never, or"):
        Setting(2, 4, "fit")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^rematerialize is \(1,\); it must be one of .* 2 whole numbers, one per"):
        Setting(2, 4, (1,))


def test_stages_are_compared_by_what_they_do() -> None:
    """Without recomputation a micro-batch takes 4 and 6 seconds, with it 7 and 7."""
    seconds = [LayerSeconds(3, 3, 1), LayerSeconds(1, 1, 5), LayerSeconds(0, 0, 0)]
    found = {
        mode: plan_step([layer(), layer(), LOSS], seconds, [1, 1], Setting(2, 4, mode), UNIT).imbalance
        for mode in (Rematerialize.NEVER, Rematerialize.ALWAYS)
    }
    assert found == {Rematerialize.NEVER: pytest.approx(0.2), Rematerialize.ALWAYS: pytest.approx(0)}


def test_gradients_come_back_for_what_is_differentiable_alone() -> None:
    both = replace(layer(), boundary_bytes=1000)  # such as numbers of tokens
    profiles = [layer(), both, LOSS]
    speed = Speed(1.0, 1.0, 1e9, 10.0)
    plan = plan_step(profiles, [LayerSeconds(1, 1, 2)] * 3, [1, 1], Setting(2, 1, Rematerialize.NEVER), speed)
    assert (plan.stages[0].output_bytes, plan.stages[0].transfer_seconds) == (1000, 100.0)
    assert plan.stages[0].return_seconds == 1.0
    assert plan.timeline.makespan_seconds == 1 + 100 + (1 + 1) + (2 + 2) + 1 + 2
    assert both.returned_bytes == 10
