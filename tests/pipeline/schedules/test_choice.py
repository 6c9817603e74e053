"""A schedule is chosen by name, or is a user's own, whose tasks are looked at before one runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import gpipe
from gpipe.pipeline.schedule import Kind, Rematerialize, StepSchedule, Task
from gpipe.pipeline.schedules.choice import SCHEDULES, check_schedule, choose_schedule, plan_tasks
from tests.pipeline.schedule_shapes import Shape, shapes, tasks

ALWAYS = Rematerialize.ALWAYS


@given(shapes())
def test_our_own_schedules_pass_the_check_of_a_users(shape: Shape) -> None:
    check_schedule(shape.schedule(), shape.num_stages, shape.num_microbatches, shape.stages_per_device)


@given(shapes(), st.randoms(use_true_random=False))
def test_a_schedule_without_one_of_its_tasks_or_with_one_twice_is_refused(shape: Shape, random: Random) -> None:
    for change in (list.pop, lambda tasks, i: tasks.insert(i, tasks[i])):
        schedule = [list(tasks) for tasks in shape.schedule()]
        tasks = random.choice(schedule)
        position = random.randrange(len(tasks))
        if tasks[position].kind is Kind.RECOMPUTE and change is list.pop:
            continue  # a mode of its own
        change(tasks, position)
        with pytest.raises(ValueError, match=r"^the schedule has .* it must be forward, optionally recompute, and"):
            check_schedule(schedule, shape.num_stages, shape.num_microbatches, shape.stages_per_device)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([tasks("F0 B0 F1 B1", 0)], r"^the schedule has the tasks of 1 devices; 2 were expected$"),
        (
            [[*tasks("F0 B0", 1), *tasks("F0 B0", 0)], tasks("F0 B0", 1)],
            r"has a forward of stage 1, micro-batch 0 on device 1; each of the 2 stages belongs to one device",
        ),
        (
            [tasks("F0 I0 F1 I1", 0), tasks("F0 I0 F1 I1", 1)],
            r"has forward, input gradients for stage 0, micro-batch 0",
        ),
        (
            [tasks("F0 I0 F1 I1 W1 W0", 0), tasks("F0 I0 F1 I1 W0 W1", 1)],
            r"weight gradients of stage 0 in the order of micro-batches \[1, 0\], and .* \[0, 1\]; they",
        ),
        ([tasks("F0 I0 W0 F1 B1", 0), tasks("F0 B0 F1 B1", 1)], r"forwards and backwards of stage 0 .* splits diff"),
        ([[*tasks("F0 B0 F1 B1", 0), *tasks("", 1)], []], r"has nothing for stage 1, micro-batch 0"),
        ([tasks("F0 B0 F2 B2", 0), tasks("F0 B0", 1)], r"has a forward of stage 0, micro-batch 2 on device 0; .* 1$"),
        ([tasks("B0 F0 F1 B1", 0), tasks("F0 B0 F1 B1", 1)], r"has backward, forward for stage 0, micro-batch 0;"),
        (
            [tasks("F0 F1 B0 B1", 0), tasks("F0 F1 B1 B0", 1)],
            r"backwards of stage 0 in the order .* \[0, 1, 0, 1\], .* \[0, 1, 1, 0\],",
        ),
        ([tasks("F0 B0 F1 B1", 0), tasks("F0 F1 B0 B1", 1)], "the schedule cannot proceed"),
    ],
)
def test_a_users_schedule_is_refused_with_the_reason(schedule: StepSchedule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_schedule(lambda *_: schedule, 2, 2, ALWAYS, 1)


@pytest.mark.parametrize(
    "returned", [None, 3, ["F0 B0", "F0 B0"], [None, None], [[("forward", 0, 0)], []], [[Task("forward", 0, 0)], []]]
)
def test_what_is_no_schedule_is_refused(returned: object) -> None:
    with pytest.raises(TypeError, match=r"^the schedule returned .{1,80}; it must be a list with a list of tasks "):
        choose_schedule(lambda *_: returned, 2, 2, ALWAYS, 1)


def test_a_schedule_may_be_one_with_some_arguments_given() -> None:
    def schedule(*shape: Any, name: str) -> StepSchedule:
        return SCHEDULES[name](*shape)

    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipeline = gpipe.Pipeline(layers, F.mse_loss, [1, 1], 2, schedule=partial(schedule, name="1f1b"))
    assert pipeline.train_step((torch.ones(4, 2), torch.ones(4, 2))).num_microbatches == 2


def test_an_unknown_schedule_is_refused_with_the_names_of_those_that_there_are() -> None:
    with pytest.raises(
        ValueError,
        match=rf"^schedule is '1b1f'; it must be one of {', '.join(SCHEDULES)}, or a ",
    ):
        choose_schedule("1b1f", 2, 2, ALWAYS, 1)


def test_a_schedule_may_be_an_object_that_is_told_apart_by_nothing() -> None:
    @dataclass
    class Named:
        name: str

        def __call__(self, *shape: Any) -> StepSchedule:
            return SCHEDULES[self.name](*shape)

    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipeline = gpipe.Pipeline(layers, F.mse_loss, [1, 1], 2, schedule=Named("1f1b"))
    assert pipeline.train_step((torch.ones(4, 2), torch.ones(4, 2))).num_microbatches == 2
    with pytest.raises(
        ValueError, match=r"^schedule is gpipe\.pipeline\.schedules\.zero_bubble\.split_gpipe and shard_replicas is"
    ):
        gpipe.Pipeline(layers, F.mse_loss, [1, 1], 2, schedule=partial(SCHEDULES["split_gpipe"]), shard_replicas=True)


def test_a_stages_last_micro_batch_is_that_whose_gradients_of_weights_are_made_last() -> None:
    def schedule(*_: Any) -> StepSchedule:
        return [tasks("F0 F1 I0 B1 W0", 0)]

    assert plan_tasks(schedule, 1, 2, ALWAYS, 1, (0,), None)[2] == {0: 0}


@pytest.mark.parametrize("text", ["R0 F0 B0", "F0 B0 R0"])
def test_a_recomputation_comes_behind_its_forward(text: str) -> None:
    with pytest.raises(ValueError, match="it must be forward, optionally recompute, and backward"):
        check_schedule([tasks(text, 0)], 1, 1, 1)


def test_devices_with_other_numbers_of_stages_are_refused() -> None:
    forwards, backwards = ([tasks(f"{letter}0", stage) for stage in range(4)] for letter in "FB")
    first = [task for part in (forwards[:3], backwards[2::-1]) for (task,) in part]
    with pytest.raises(ValueError, match=r"^the devices of the schedule have \[3, 1\] stages; each needs 2$"):
        check_schedule([first, [*forwards[3], *backwards[3]]], 4, 1, 2)


def test_a_users_schedule_is_looked_at_for_each_number_of_micro_batches() -> None:
    def schedule(_: int, num_microbatches: int, *__: Any) -> StepSchedule:
        return [tasks("F0 B0 F1 B1" if num_microbatches == 2 else "F0", 0)]

    function, placement = choose_schedule(schedule, 1, 2, ALWAYS, 1)
    with pytest.raises(ValueError, match="the schedule has forward for stage 0, micro-batch 0"):
        plan_tasks(function, 1, 1, ALWAYS, 1, placement, None)
