"""Random sequences of strangers' layers train bit by bit alike, however they are cut, recomputed and launched.

The oracle is one stage without recomputation. `make test` draws 150 cases, `make reliability` a thousand more.
"""

from __future__ import annotations

import random

import pytest

from tests.end_to_end.transparency_case import (
    OPTIMIZERS,
    STAGES_PER_DEVICE,
    Case,
    assert_bitwise_equal,
    cuts,
    run,
    run_in_processes,
)
from tests.support.layer_zoo import KINDS
from tests.support.process_pool import ProcessPool

MODES = ("always", "except_last", "never")
# A layer's hook on its input's gradient, where the input is the mini-batch.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")


def draw(seed: int, num_devices: int | None = None) -> Case:
    """Draw layers, a way to cut them, a schedule for up to six stages, M, N, a mode, a precision and an optimizer."""
    dice = random.Random(seed)  # even, where hypothesis prefers what is simple
    schedule = dice.choice([name for name, count in STAGES_PER_DEVICE.items() if count * (num_devices or 1) <= 8])
    stages_per_device = STAGES_PER_DEVICE[schedule]
    num_stages = stages_per_device * (num_devices or dice.randint(1, 6 // stages_per_device))
    kinds = tuple(dice.sample(sorted(KINDS), dice.randint(max(3, num_stages - 1), 8)))
    return Case(
        (*kinds, dice.choice(kinds)),
        dice.choice(cuts(len(kinds) + 2, num_stages)),
        dice.choice((1, 2, 3)),
        dice.choice((2, 3, 5)),
        dice.choice(MODES),
        schedule=schedule,
        stages_per_device=stages_per_device,
        is_zoo=True,
        is_mixed=dice.choice((False, True)),
        optimizer=dice.choice(sorted(OPTIMIZERS)),
    )


def check_in_processes(processes: ProcessPool, cases: list[Case], num_devices: int) -> None:
    expected = [run(case.one_stage()) for case in cases]
    for rank, outcomes in enumerate(processes.run(num_devices, run_in_processes, cases)):
        for case, outcome, other in zip(cases, outcomes, expected, strict=True):
            assert_bitwise_equal(outcome, other, f"{case}, rank {rank}")


@pytest.mark.parametrize(
    "seed", [*range(142), *(pytest.param(seed, marks=pytest.mark.reliability) for seed in range(142, 1042))]
)
def test_a_random_sequence_in_one_process_trains_as_one_stage_does(seed: int) -> None:
    case = draw(seed)
    assert_bitwise_equal(run(case), run(case.one_stage()), str(case))


def test_random_sequences_in_two_processes_train_as_one_stage_does(processes: ProcessPool) -> None:
    drawn = [draw(seed, 2) for seed in range(50)]
    of_each = [next(case for case in drawn if case.schedule == schedule) for schedule in STAGES_PER_DEVICE]
    check_in_processes(processes, [*of_each, *[case for case in drawn if case.is_mixed and case not in of_each][:2]], 2)


@pytest.mark.reliability
@pytest.mark.xdist_group("zoo in processes")  # which take seconds to start
@pytest.mark.parametrize("num_devices", [2, 3, 4, 6])
def test_many_random_sequences_in_processes_train_as_one_stage_does(num_devices: int, processes: ProcessPool) -> None:
    check_in_processes(processes, [draw(seed, num_devices) for seed in range(50, 75)], num_devices)


def test_every_kind_is_drawn() -> None:
    assert {kind for seed in range(142) for kind in draw(seed).kinds} == set(KINDS)
