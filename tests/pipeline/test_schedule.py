"""GPipe's tasks are those of the paper, and one process can run them in an order that respects what they need."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.pipeline.schedule import (
    SCHEDULES,
    Kind,
    Rematerialize,
    Schedule,
    Task,
    dependencies,
    gpipe,
    inference,
    sequential,
)

LETTERS = {"F": Kind.FORWARD, "R": Kind.RECOMPUTE, "B": Kind.BACKWARD}
SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 8), st.sampled_from(Rematerialize))


def tasks(text: str, stage: int) -> list[Task]:
    """Read tasks as the drawings have them: F0 R0 B0."""
    return [Task(LETTERS[word[0]], stage, int(word[1:])) for word in text.split()]


@pytest.mark.parametrize(
    ("num_microbatches", "mode", "text"),
    [
        (1, Rematerialize.ALWAYS, "F0 R0 B0"),
        (1, Rematerialize.EXCEPT_LAST, "F0 B0"),
        (1, Rematerialize.NEVER, "F0 B0"),
        (2, Rematerialize.ALWAYS, "F0 F1 R1 B1 R0 B0"),
        (2, Rematerialize.EXCEPT_LAST, "F0 F1 B1 R0 B0"),
        (2, Rematerialize.NEVER, "F0 F1 B1 B0"),
        (4, Rematerialize.ALWAYS, "F0 F1 F2 F3 R3 B3 R2 B2 R1 B1 R0 B0"),
        (4, Rematerialize.EXCEPT_LAST, "F0 F1 F2 F3 B3 R2 B2 R1 B1 R0 B0"),
        (4, Rematerialize.NEVER, "F0 F1 F2 F3 B3 B2 B1 B0"),
    ],
)
def test_every_stage_has_the_tasks_written_down_by_hand(num_microbatches: int, mode: Rematerialize, text: str) -> None:
    for num_stages in (1, 2, 3):
        expected = [tasks(text, stage) for stage in range(num_stages)]
        assert gpipe(num_stages, num_microbatches, mode) == expected


def test_evaluation_has_the_forwards_alone() -> None:
    assert inference(2, 3) == [tasks("F0 F1 F2", 0), tasks("F0 F1 F2", 1)]


def test_a_forward_needs_the_stage_before_and_a_backward_the_one_after() -> None:
    assert dependencies(Task(Kind.FORWARD, 0, 3), 3) == []
    assert dependencies(Task(Kind.FORWARD, 2, 3), 3) == [Task(Kind.FORWARD, 1, 3)]
    assert dependencies(Task(Kind.BACKWARD, 0, 3), 3) == [Task(Kind.BACKWARD, 1, 3)]
    assert dependencies(Task(Kind.BACKWARD, 2, 3), 3) == []


def test_a_recomputation_waits_for_no_gradient() -> None:
    assert [dependencies(Task(Kind.RECOMPUTE, stage, 0), 3) for stage in range(3)] == [[], [], []]


@given(SHAPES)
def test_each_micro_batch_goes_forward_is_recomputed_and_goes_backward(
    shape: tuple[int, int, Rematerialize],
) -> None:
    for schedule in (function(*shape) for function in SCHEDULES.values()):
        for stage, order in enumerate(schedule):
            assert {task.stage for task in order} == {stage}
            for micro_batch in range(shape[1]):
                kinds = [task.kind for task in order if task.micro_batch == micro_batch]
                assert kinds in (
                    [Kind.FORWARD, Kind.BACKWARD],
                    [Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD],
                )


@given(SHAPES)
def test_one_process_runs_every_task_once_and_after_what_it_needs(shape: tuple[int, int, Rematerialize]) -> None:
    for schedule in (gpipe(*shape), inference(*shape[:2])):
        order = sequential(schedule)
        assert sorted(order) == sorted(itertools.chain(*schedule))
        place = {task: i for i, task in enumerate(order)}
        for task in order:
            assert all(place[needed] < place[task] for needed in dependencies(task, shape[0]))
        for stage, own in enumerate(schedule):
            assert [task for task in order if task.stage == stage] == own


@given(SHAPES)
def test_one_process_never_holds_two_recomputed_graphs(shape: tuple[int, int, Rematerialize]) -> None:
    waiting: set[tuple[int, int]] = set()
    for kind, stage, micro_batch in sequential(gpipe(*shape)):
        if kind is Kind.RECOMPUTE:
            waiting.add((stage, micro_batch))
        elif kind is Kind.BACKWARD:
            waiting.discard((stage, micro_batch))
        assert len(waiting) <= 1


def test_stages_take_turns_in_one_process() -> None:
    forwards = sequential(inference(3, 3))
    assert [(task.stage, task.micro_batch) for task in forwards] == [
        *[(0, 0)],
        *[(0, 1), (1, 0)],
        *[(0, 2), (1, 1), (2, 0)],
        *[(1, 2), (2, 1)],
        *[(2, 2)],
    ]


@pytest.mark.parametrize(
    "schedule",
    [
        [tasks("F0 F1", 0), tasks("F1 F2", 1)],  # nobody makes micro-batch 2
        [tasks("F0 B0 F1 B1", 0), tasks("F0 F1 B0 B1", 1)],  # each waits for the other
    ],
)
def test_a_schedule_that_cannot_proceed_is_refused(schedule: Schedule) -> None:
    with pytest.raises(ValueError, match="the schedule cannot proceed: every stage waits for a task"):
        sequential(schedule)
