"""Learning rates at their boundaries, and against timm's schedulers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gpipe._compat.torchvision  # noqa: F401
from gpipe.training.learning_rate import Schedule, build_schedule, constant, cosine, exponential, inverse_square_root

from timm.scheduler import CosineLRScheduler, StepLRScheduler  # isort: skip


def timm_rate(scheduler: type, step: int, base: float, **settings: object) -> float:
    """The rate that one of timm's schedulers sets after `step` updates."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=base)
    scheduler(optimizer, t_in_epochs=False, **settings).step_update(step)
    return float(optimizer.param_groups[0]["lr"])


def test_the_staircase_falls_at_whole_stairs() -> None:
    rate = exponential(1.0, decay_rate=0.97, decay_steps=10)
    assert [rate(0), rate(9), rate(10), rate(19), rate(20)] == [1.0, 1.0, 0.97, 0.97, 0.97**2]


def test_the_staircase_counts_from_the_start_of_training() -> None:
    rate = exponential(1.0, decay_rate=0.5, decay_steps=4, warm_up_steps=6)
    assert (rate(5), rate(6), rate(8)) == (1.0, 0.5, 0.25)


@pytest.mark.parametrize(
    "rate",
    [
        constant(2.0, warm_up_steps=4),
        exponential(2.0, decay_rate=0.5, decay_steps=100, warm_up_steps=4),
        cosine(2.0, num_steps=100, warm_up_steps=4),
    ],
)
def test_the_warm_up_is_linear_and_its_first_step_counts(rate: Schedule) -> None:
    assert [rate(step) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_the_cosine_ends_at_its_final_rate_and_stays() -> None:
    rate = cosine(1.0, num_steps=12, warm_up_steps=2, final=0.1)
    assert rate(2) == 1.0
    assert math.isclose(rate(7), 0.55)
    assert math.isclose(rate(12), 0.1) and rate(50) == rate(12)


def test_the_inverse_square_root_is_vaswanis() -> None:
    rate = inverse_square_root(512**-0.5 * 4000**-0.5, warm_up_steps=4000)
    for step in (1, 100, 4000, 4001, 100_000):  # theirs counts from 1
        assert math.isclose(rate(step - 1), 512**-0.5 * min(step**-0.5, step * 4000**-1.5))


def test_the_inverse_square_root_needs_a_warm_up() -> None:
    with pytest.raises(
        ValueError, match="warm_up_epochs gives 0 warm-up steps, but the inverse square root needs at least 1"
    ):
        build_schedule("inverse_square_root", 1.0, steps_per_epoch=10, num_steps=100)


def test_a_warm_up_in_steps_takes_the_place_of_one_in_epochs() -> None:
    settings = {"steps_per_epoch": 10, "num_steps": 100, "warm_up_epochs": 5.0}
    assert build_schedule("constant", 1.0, warm_up_steps=4, **settings)(1) == 0.5


@given(step=st.integers(0, 200), decay_steps=st.integers(1, 40))
def test_exponential_is_timms(step: int, decay_steps: int) -> None:
    expected = timm_rate(StepLRScheduler, step, 0.3, decay_t=decay_steps, decay_rate=0.9)
    assert math.isclose(exponential(0.3, decay_rate=0.9, decay_steps=decay_steps)(step), expected)


@given(step=st.integers(0, 40), num_steps=st.integers(7, 40))
def test_cosine_is_timms(step: int, num_steps: int) -> None:
    expected = timm_rate(CosineLRScheduler, step, 0.3, t_initial=num_steps, lr_min=0.01)
    assert math.isclose(cosine(0.3, num_steps=num_steps, final=0.01)(step), expected)


def test_epochs_become_steps() -> None:
    rate = build_schedule("exponential", 1.0, steps_per_epoch=10, num_steps=1000, warm_up_epochs=0.5)
    assert rate(0) == 0.2 and rate(4) == 1.0
    assert rate(29) == 1.0 and rate(30) == 0.97
    assert build_schedule("cosine", 1.0, steps_per_epoch=10, num_steps=20)(10) == 0.5
    assert build_schedule("constant", 1.0, steps_per_epoch=10, num_steps=20)(19) == 1.0


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="decay_epochs gives 0 steps"):
        exponential(1.0, decay_rate=0.9, decay_steps=0)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^the schedule is .cosin., expected exponential, cosine, .*: correct its"):
        build_schedule("cosin", 1.0, steps_per_epoch=10, num_steps=20)


def test_a_warm_up_longer_than_training_only_rises() -> None:
    rate = cosine(1.0, num_steps=3, warm_up_steps=4)
    assert [rate(step) for step in range(3)] == [0.25, 0.5, 0.75]
