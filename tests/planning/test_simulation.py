"""A schedule takes as long as arithmetic says."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.pipeline.schedule import Kind, Rematerialize, Task, dependencies
from gpipe.pipeline.schedule import gpipe as gpipe_schedule
from gpipe.pipeline.schedules.choice import SCHEDULES
from gpipe.pipeline.timeline import Timeline
from gpipe.planning.simulation import simulate

F, R, B = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD
SECONDS = {F: 1.0, R: 1.0, B: 2.0}
SHAPES = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3)]
ALL_NAMES = st.sampled_from([*SHAPES, ("split_gpipe", 1), ("zb_h1", 1), ("zb_v", 2)])
NAMES = st.sampled_from(SHAPES)


def spans(timeline: Timeline) -> dict[tuple[str, int, int], tuple[float, float]]:
    return {(str(t.kind)[0], t.stage, t.micro_batch): (start, end) for t, start, end in timeline.events}


def test_two_stages_and_two_micro_batches_run_as_computed_by_hand() -> None:
    schedule = gpipe_schedule(2, 2, Rematerialize.NEVER)
    timeline = simulate(schedule, lambda task: SECONDS[task.kind] * (1 + task.stage))
    assert spans(timeline) == {
        ("f", 0, 0): (0, 1),
        ("f", 0, 1): (1, 2),
        ("f", 1, 0): (1, 3),
        ("f", 1, 1): (3, 5),
        ("b", 1, 1): (5, 9),
        ("b", 1, 0): (9, 13),
        ("b", 0, 1): (9, 11),
        ("b", 0, 0): (13, 15),
    }
    assert timeline.makespan_seconds == 15
    assert timeline.busy_seconds() == [6, 12]
    assert timeline.busy_seconds(B) == [4, 8]
    assert timeline.bubble == pytest.approx(1 - 18 / 30)


def test_a_recomputation_runs_while_the_gradient_is_awaited() -> None:
    timeline = simulate(gpipe_schedule(2, 2, Rematerialize.ALWAYS), lambda task: SECONDS[task.kind])
    assert spans(timeline) == {
        ("f", 0, 0): (0, 1),
        ("f", 0, 1): (1, 2),
        ("f", 1, 0): (1, 2),
        ("f", 1, 1): (2, 3),
        ("r", 1, 1): (3, 4),
        ("b", 1, 1): (4, 6),
        ("r", 0, 1): (2, 3),  # done long before its gradient comes
        ("b", 0, 1): (6, 8),
        ("r", 1, 0): (6, 7),
        ("b", 1, 0): (7, 9),
        ("r", 0, 0): (8, 9),
        ("b", 0, 0): (9, 11),
    }


def test_a_transfer_delays_the_stage_that_waits_for_it() -> None:
    timeline = simulate(
        gpipe_schedule(2, 1, Rematerialize.ALWAYS),
        lambda task: SECONDS[task.kind],
        lambda task: 0.5 if task.kind is F else 3.0,
    )
    assert spans(timeline) == {
        ("f", 0, 0): (0, 1),
        ("f", 1, 0): (1.5, 2.5),
        ("r", 1, 0): (2.5, 3.5),
        ("b", 1, 0): (3.5, 5.5),
        ("r", 0, 0): (1, 2),
        ("b", 0, 0): (8.5, 10.5),
    }


def test_a_link_carries_one_result_at_a_time() -> None:
    schedule = gpipe_schedule(2, 3, Rematerialize.NEVER)
    found = spans(simulate(schedule, lambda task: SECONDS[task.kind], lambda _: 1.5))
    assert [found["f", 1, m][0] for m in range(3)] == [2.5, 4.0, 5.5]  # made at 1, 2, 3
    assert [found["b", 0, m][0] for m in (2, 1, 0)] == [10.0, 12.0, 14.0]  # made at 8.5, 10.5, 12.5


def test_nothing_travels_between_the_stages_of_one_device() -> None:
    schedule = SCHEDULES["interleaved_1f1b"](3, 2, Rematerialize.NEVER, 3)
    assert simulate(schedule, lambda _: 1.0, lambda _: 5.0).makespan_seconds == 12


@given(st.integers(1, 8), st.integers(1, 12), NAMES)
def test_the_bubble_of_equal_stages_is_that_of_the_papers(
    num_devices: int, num_microbatches: int, name: tuple[str, int]
) -> None:
    schedule, stages_per_device = name
    if stages_per_device > 1:
        num_microbatches *= num_devices  # whole rounds
    tasks = SCHEDULES[schedule](
        num_devices * stages_per_device, num_microbatches, Rematerialize.NEVER, stages_per_device
    )
    bubble = simulate(tasks, lambda task: SECONDS[task.kind]).bubble
    work = num_microbatches * stages_per_device
    assert bubble == pytest.approx((num_devices - 1) / (work + num_devices - 1))


@given(
    st.integers(1, 5), st.integers(1, 6), st.sampled_from(Rematerialize), ALL_NAMES, st.randoms(use_true_random=False)
)
def test_no_simulated_task_starts_before_what_it_needs(
    num_devices: int, num_microbatches: int, mode: Rematerialize, name: tuple[str, int], source: object
) -> None:
    durations: dict[Task, float] = {}
    num_stages = num_devices * name[1]
    schedule = SCHEDULES[name[0]](num_stages, num_microbatches, mode, name[1])
    for task in itertools.chain(*schedule):
        durations[task] = source.uniform(0.3, 3)  # longer than a transfer: no link is ever busy  # type: ignore[attr-defined]
    timeline = simulate(schedule, durations.__getitem__, lambda _: 0.25)
    when = {event.task: event for event in timeline.events}
    assert len(when) == len(timeline.events) == len(durations)
    for tasks in schedule:
        for before, after in itertools.pairwise(tasks):
            assert when[after].start >= when[before].end
    for task, event in when.items():
        needed = dependencies(task, num_stages)
        is_local = [timeline.row(other) == timeline.row(task) for other in needed]
        earliest = [when[other].end + 0.25 * (not local) for other, local in zip(needed, is_local, strict=True)]
        same_row = [e for t, e in when.items() if timeline.row(t) == timeline.row(task)]
        earliest += [e.end for e in same_row if e.end <= event.start]
        assert event.start == max(earliest, default=0.0)


def test_a_schedule_that_cannot_proceed_is_refused() -> None:
    with pytest.raises(ValueError, match="the schedule cannot proceed"):
        simulate([[Task(F, 0, 0)], [Task(F, 1, 1)]], lambda _: 1.0)
