"""The shares of a planned step, against formulas."""

from dataclasses import replace

import pytest

from experiments.table2_throughput.breakdown import Breakdown, break_down
from gpipe.pipeline.schedule import Kind
from gpipe.planning.accelerator import LayerSeconds
from gpipe.planning.simulation import simulate
from gpipe.planning.step import Plan, Setting, StagePlan

FORWARD, RECOMPUTE, BACKWARD, WEIGHTS = 2.0, 3.0, 4.0, 1.5


def plan_of(setting: Setting, scales: list[float], transfer: float = 0.0, update: float = 0.0) -> Plan:
    stages = []
    for scale in scales:
        work = LayerSeconds(scale * FORWARD, scale * RECOMPUTE, scale * BACKWARD, scale * WEIGHTS)
        stages.append(StagePlan(*(0,) * 5, work, 0, transfer, transfer, task_seconds=0.0))
    timeline = simulate(setting.tasks, lambda task: stages[task.stage].seconds(task.kind), lambda _: transfer)
    return Plan(setting, tuple(stages), (), timeline, 0.0, update, 0.0)


@pytest.mark.parametrize("num_microbatches", [1, 4, 32])
@pytest.mark.parametrize("num_stages", [1, 2, 8])
def test_equal_stages_compute_recompute_and_wait_as_the_formula_says(num_stages: int, num_microbatches: int) -> None:
    setting = Setting(num_stages, num_microbatches)
    found = plan_of(setting, [1.0] * num_stages, update=5.0)
    # All forwards reach the last stage, which recomputes and goes back; the last gradient travels to the first stage.
    others = num_stages - 1
    span = (num_microbatches + others) * FORWARD + num_microbatches * (RECOMPUTE + BACKWARD) + others * BACKWARD
    assert found.step_seconds == pytest.approx(span + 5.0)
    shares = break_down(found)
    busy = num_microbatches * (FORWARD + BACKWARD)
    recomputation = num_microbatches * RECOMPUTE
    expected = Breakdown(busy, recomputation, span - busy - recomputation, 0.0, 0.0, 5.0)
    assert shares == pytest.approx([part / (span + 5.0) for part in expected])


@pytest.mark.parametrize("scales", [[1.0, 3.0], [3.0, 1.0, 2.0, 1.0]])
def test_the_shares_of_unequal_stages_with_slow_links_add_up_to_one(scales: list[float]) -> None:
    setting = Setting(len(scales), 4)
    shares = break_down(plan_of(setting, scales, transfer=0.5, update=1.0))
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) > 0


def test_what_a_stage_takes_longer_is_imbalance_and_what_a_link_takes_is_transfer() -> None:
    setting = Setting(2, 1)
    alone = plan_of(setting, [1.0, 1.0]).step_seconds
    # Two transfers, one there and one back, of which the second one is hidden by nothing.
    slow = plan_of(setting, [1.0, 1.0], transfer=1.0)
    assert break_down(slow).transfer == pytest.approx(2.0 / (alone + 2.0))
    unequal = plan_of(Setting(2, 100), [1.0, 3.0])
    # Nearly all of the time the second stage works, and the mean is two thirds of it.
    assert break_down(unequal).imbalance == pytest.approx(1 / 3, abs=0.01)


def test_averaging_over_replicas_is_transfer() -> None:
    setting = Setting(2, 4)
    found = replace(plan_of(setting, [1.0, 1.0]), averaging_seconds=6.0)
    assert break_down(found).transfer == pytest.approx(6.0 / found.step_seconds)


def test_recomputation_is_part_of_the_stages_time() -> None:
    stage = plan_of(Setting(1, 1), [1.0]).stages[0]
    assert [stage.seconds(kind) for kind in Kind] == [FORWARD, RECOMPUTE, BACKWARD, BACKWARD - WEIGHTS, WEIGHTS]
