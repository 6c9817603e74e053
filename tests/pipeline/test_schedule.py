"""The tasks are those of the papers, no device waits for ever, and one process can run them all in order."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.pipeline.schedule import (
    Kind,
    Rematerialize,
    StepSchedule,
    Task,
    check_stages_per_device,
    dependencies,
    gpipe,
    inference,
    sequential,
)
from gpipe.pipeline.schedules.choice import SCHEDULES, SPLIT_SCHEDULES, place_stages
from gpipe.pipeline.schedules.one_forward_one_backward import (
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
)
from gpipe.pipeline.schedules.zero_bubble import split_gpipe, zero_bubble_h1, zero_bubble_v
from gpipe.planning.simulation import simulate
from tests.pipeline.schedule_shapes import LETTERS, STAGES_PER_DEVICE, Shape, shapes, tasks

ALWAYS, EXCEPT_LAST, NEVER = Rematerialize
LETTER_OF = {kind: letter for letter, kind in LETTERS.items()}


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


@pytest.mark.parametrize(
    ("num_microbatches", "mode", "texts"),
    [
        (4, NEVER, ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
        (
            4,
            ALWAYS,
            [
                "F0 F1 F2 R0 B0 F3 R1 B1 R2 B2 R3 B3",
                "F0 F1 R0 B0 F2 R1 B1 F3 R2 B2 R3 B3",
                "F0 R0 B0 F1 R1 B1 F2 R2 B2 F3 R3 B3",
            ],
        ),
        (2, EXCEPT_LAST, ["F0 F1 R0 B0 R1 B1", "F0 F1 R0 B0 R1 B1", "F0 B0 F1 B1"]),
        (1, EXCEPT_LAST, ["F0 B0", "F0 B0", "F0 B0"]),
    ],
)
def test_1f1b_alternates_forwards_and_backwards(num_microbatches: int, mode: Rematerialize, texts: list[str]) -> None:
    expected = [tasks(text, stage) for stage, text in enumerate(texts)]
    assert one_forward_one_backward(3, num_microbatches, mode) == expected


@pytest.mark.parametrize(
    ("num_microbatches", "mode", "texts"),
    [
        (
            4,
            NEVER,
            ["F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3", "F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3"],
        ),
        (3, NEVER, ["F0 F1 f0 f1 b0 F2 b1 f2 B0 B1 b2 B2", "F0 F1 f0 b0 f1 b1 F2 B0 f2 B1 b2 B2"]),
        (2, EXCEPT_LAST, ["F0 F1 f0 f1 r0 b0 r1 b1 R0 B0 R1 B1", "F0 F1 f0 b0 f1 b1 R0 B0 R1 B1"]),
        (1, ALWAYS, ["F0 f0 r0 b0 R0 B0", "F0 f0 r0 b0 R0 B0"]),
    ],
)
def test_interleaved_1f1b_runs_rounds_through_each_stage_of_a_device(
    num_microbatches: int, mode: Rematerialize, texts: list[str]
) -> None:
    expected = [tasks(text, device, 2) for device, text in enumerate(texts)]
    assert interleaved_one_forward_one_backward(4, num_microbatches, mode) == expected


def test_split_gpipe_makes_weight_gradients_after_each_input_gradients() -> None:
    assert split_gpipe(2, 3, NEVER) == [tasks("F0 F1 F2 I2 W2 I1 W1 I0 W0", stage) for stage in (0, 1)]
    assert split_gpipe(1, 2, ALWAYS) == [tasks("F0 F1 R1 I1 W1 R0 I0 W0", 0)]


@pytest.mark.parametrize(
    ("num_microbatches", "mode", "texts"),
    [
        (
            4,
            NEVER,
            [
                "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
                "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
                "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
            ],
        ),
        (2, EXCEPT_LAST, ["F0 F1 R0 I0 W0 R1 I1 W1", "F0 F1 R0 I0 R1 I1 W0 W1", "F0 I0 F1 I1 W0 W1"]),
    ],
)
def test_zero_bubble_h1_is_the_papers_figure(num_microbatches: int, mode: Rematerialize, texts: list[str]) -> None:
    assert zero_bubble_h1(3, num_microbatches, mode) == [tasks(text, stage) for stage, text in enumerate(texts)]


def test_zero_bubble_v_goes_down_the_devices_and_back_up() -> None:
    assert zero_bubble_v(4, 4, NEVER) == [
        tasks("F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3", 0, 3),
        tasks("F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3", 1, 1),
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_drawn_in_its_docstring(name: str) -> None:
    """One row per device; gaps and dots are time in which a device waits, or works on."""
    function = SCHEDULES[name]
    rows = re.findall(r"^ +(?:stage|device) \d +(.+)$", function.__doc__ or "", re.MULTILINE)
    per_device = 2 if name in STAGES_PER_DEVICE else 1
    assert len(rows) == 4 - per_device
    num_stages, num_microbatches = per_device * len(rows), 1 + max(map(int, re.findall(r"\d", rows[0])))
    schedule = function(num_stages, num_microbatches, ALWAYS if "R" in rows[0] else NEVER, per_device)
    placement = place_stages(name, num_stages, per_device)
    for device, row in enumerate(rows):
        second = max(stage for stage, place in enumerate(placement) if place == device)
        assert schedule[device] == tasks(row.replace(".", ""), device, second - device)


@given(st.integers(1, 8), st.integers(1, 40))
def test_split_backwards_leave_the_bubble_that_the_paper_says(num_devices: int, num_microbatches: int) -> None:
    """The parts take a unit each, of a stage; stages in a V are half as large."""
    work, ramp, most = 3 * num_microbatches, num_devices - 1, max(num_microbatches, num_devices)

    def seconds(schedule: StepSchedule, unit: float) -> float:
        return simulate(schedule, lambda _: unit).makespan_seconds

    assert seconds(split_gpipe(num_devices, num_microbatches, NEVER), 1.0) == work + 2 * ramp
    if num_microbatches >= num_devices:
        assert seconds(zero_bubble_h1(num_devices, num_microbatches, NEVER), 1.0) == work + ramp
    if most >= 2 * num_devices - 1:
        assert seconds(zero_bubble_v(2 * num_devices, num_microbatches, NEVER), 0.5) <= work + ramp / 2


def test_evaluation_has_the_forwards_alone() -> None:
    assert inference((0, 1), 3) == [tasks("F0 F1 F2", 0), tasks("F0 F1 F2", 1)]
    assert inference((0, 1, 0, 1), 3) == [tasks("F0 F1 f0 f1 F2 f2", device, 2) for device in (0, 1)]
    assert inference((0, 1, 1, 0), 3) == [tasks("F0 F1 f0 f1 F2 f2", 0, 3), tasks("F0 F1 f0 f1 F2 f2", 1, 1)]


def test_a_forward_needs_the_stage_before_and_a_backward_the_one_after() -> None:
    assert dependencies(Task(Kind.FORWARD, 0, 3), 3) == []
    assert dependencies(Task(Kind.FORWARD, 2, 3), 3) == [Task(Kind.FORWARD, 1, 3)]
    assert dependencies(Task(Kind.BACKWARD, 0, 3), 3) == [Task(Kind.BACKWARD, 1, 3)]
    assert dependencies(Task(Kind.BACKWARD, 2, 3), 3) == []


def test_a_recomputation_waits_for_no_gradient() -> None:
    assert [dependencies(Task(Kind.RECOMPUTE, stage, 0), 3) for stage in range(3)] == [[], [], []]


@given(shapes())
def test_each_micro_batch_goes_forward_is_recomputed_and_goes_backward(shape: Shape) -> None:
    schedule = shape.schedule()
    assert len(schedule) == shape.num_devices
    for device, order in enumerate(schedule):
        stages = [stage for stage, place in enumerate(shape.placement) if place == device]
        assert len(stages) == shape.stages_per_device and {task.stage for task in order} == set(stages)
        for stage, micro_batch in itertools.product(stages, range(shape.num_microbatches)):
            places = [i for i, task in enumerate(order) if task[1:] == (stage, micro_batch)]
            if is_split := shape.name in SPLIT_SCHEDULES:
                assert order[places.pop()].kind is Kind.WEIGHT_GRADIENTS
            forward, *recomputation, backward = places
            expected = Kind.INPUT_GRADIENTS if is_split else Kind.BACKWARD
            assert [order[i].kind for i in (forward, backward)] == [Kind.FORWARD, expected]
            if shape.mode is ALWAYS or (shape.mode is EXCEPT_LAST and backward - forward > 1):
                assert recomputation == [backward - 1]
                assert order[backward - 1].kind is Kind.RECOMPUTE
            else:
                assert recomputation == []


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((0, 0, 0), ["F0 F1 F2 R2 B2 R1 B1 R0 B0"] * 3),
        ((2, 1, 3), ["F0 F1 F2 B2 B1 R0 B0", "F0 F1 F2 B2 R1 B1 R0 B0", "F0 F1 F2 B2 B1 B0"]),
    ],
)
def test_a_stage_keeps_the_graphs_that_are_needed_first(counts: tuple[int, ...], expected: list[str]) -> None:
    assert gpipe(3, 3, counts) == [tasks(line, stage) for stage, line in enumerate(expected)]


@given(shapes(), st.data())
def test_a_stage_keeps_as_many_graphs_as_it_may_and_never_more_at_once(shape: Shape, data: st.DataObject) -> None:
    """Compared with all choices of micro-batches, where there are not too many."""
    counts = tuple(data.draw(st.lists(st.integers(0, 4), min_size=shape.num_stages, max_size=shape.num_stages)))
    whole = replace(shape, mode=NEVER).schedule()
    for device, order in enumerate(replace(shape, mode=counts).schedule()):
        assert [task for task in order if task.kind is not Kind.RECOMPUTE] == whole[device]
        for stage in {task.stage for task in order}:
            intervals = find_intervals(whole[device], stage)
            recomputed = {task.micro_batch for task in order if task[:2] == (Kind.RECOMPUTE, stage)}
            kept = [interval for micro_batch, interval in intervals.items() if micro_batch not in recomputed]
            assert count_most_at_once(kept) <= counts[stage]
            if len(intervals) <= 8:
                larger = itertools.combinations(intervals.values(), len(kept) + 1)
                assert all(count_most_at_once(choice) > counts[stage] for choice in larger)


def find_intervals(order: list[Task], stage: int) -> dict[int, tuple[int, int]]:
    """Return from where to where in a device's tasks each micro-batch has a graph, if its forward keeps it."""
    own = [(position, task) for position, task in enumerate(order) if task.stage == stage]
    starts = {task.micro_batch: position for position, task in own if task.kind is Kind.FORWARD}
    return {task.micro_batch: (starts[task.micro_batch], end) for end, task in own if task.kind.makes_gradients}


def count_most_at_once(intervals: Sequence[tuple[int, int]]) -> int:
    return max((sum(start <= point < end for start, end in intervals) for point, _ in intervals), default=0)


@given(shapes())
def test_numbers_of_graphs_include_the_modes(shape: Shape) -> None:
    for mode, count in ((ALWAYS, 0), (NEVER, shape.num_microbatches)):
        counts = (count,) * shape.num_stages
        assert replace(shape, mode=mode).schedule() == replace(shape, mode=counts).schedule()
    if shape.name == "gpipe":
        counts = (1,) * shape.num_stages
        assert replace(shape, mode=EXCEPT_LAST).schedule() == replace(shape, mode=counts).schedule()


@given(shapes())
def test_one_process_runs_every_task_once_and_after_what_it_needs(shape: Shape) -> None:
    for schedule in (shape.schedule(), shape.inference()):
        order = sequential(schedule)
        assert sorted(order) == sorted(itertools.chain(*schedule))
        place = {task: i for i, task in enumerate(order)}
        for task in order:
            assert all(place[needed] < place[task] for needed in dependencies(task, shape.num_stages))
        for device, own in enumerate(schedule):
            assert [task for task in order if shape.placement[task.stage] == device] == own


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_device_waits_for_ever(name: str) -> None:
    """Of up to 8 devices with up to 16 micro-batches."""
    mode = itertools.cycle(Rematerialize)
    for num_devices, stages_per_device, num_microbatches in itertools.product(
        range(1, 9), sorted({*STAGES_PER_DEVICE.get(name, (1,))}), range(1, 17)
    ):
        shape = Shape(name, num_devices, stages_per_device, num_microbatches, next(mode))
        for schedule in (shape.schedule(), shape.inference()):
            timeline = simulate(schedule, lambda _: 1.0, lambda _: 0.3)
            assert sorted(event.task for event in timeline.events) == sorted(itertools.chain(*schedule)), shape


@given(shapes())
def test_both_ends_of_a_boundary_see_the_micro_batches_in_one_order(shape: Shape) -> None:
    for schedule in (shape.schedule(), shape.inference()):
        orders = {
            (kind, stage): [task.micro_batch for tasks in schedule for task in tasks if task[:2] == (kind, stage)]
            for kind, stage in itertools.product(set(Kind) - {Kind.RECOMPUTE}, range(shape.num_stages))
        }
        for (kind, stage), order in orders.items():
            assert order == orders[kind, 0]
            assert order in (sorted(order), sorted(order, reverse=True)), stage


@given(shapes())
def test_a_device_holds_no_more_micro_batches_than_the_papers_say(shape: Shape) -> None:
    for device, order in enumerate(shape.schedule()):
        held = most = 0
        for task in order:
            held += {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT_GRADIENTS: -1}.get(task.kind, 0)
            most = max(most, held)
        num_stages = shape.num_devices * shape.stages_per_device
        bound = {
            "gpipe": shape.num_microbatches,
            "split_gpipe": shape.num_microbatches,
            "1f1b": num_stages - device,
            "zb_h1": num_stages,
            "zb_v": num_stages,
            # Narayanan et al., 2021: all of a device's stages for a round, and 2 more for each device after it.
            "interleaved_1f1b": num_stages - shape.num_devices + 2 * (shape.num_devices - 1 - device) + 1,
        }[shape.name]
        assert most <= bound


@given(shapes())
def test_one_process_never_holds_two_recomputed_graphs(shape: Shape) -> None:
    waiting: set[tuple[int, int]] = set()
    for kind, stage, micro_batch in sequential(shape.schedule()):
        if kind is Kind.RECOMPUTE:
            waiting.add((stage, micro_batch))
        elif kind.makes_gradients:
            waiting.discard((stage, micro_batch))
        assert len(waiting) <= 1


def test_stages_take_turns_in_one_process() -> None:
    forwards = sequential(inference((0, 1, 2), 3))
    assert [(task.stage, task.micro_batch) for task in forwards] == [
        *[(0, 0)],
        *[(0, 1), (1, 0)],
        *[(0, 2), (1, 1), (2, 0)],
        *[(1, 2), (2, 1)],
        *[(2, 2)],
    ]


@pytest.mark.parametrize(
    ("schedule", "task"),
    [
        # Nobody makes micro-batch 2.
        ([tasks("F0 F1", 0), tasks("F1 F2", 1)], "on device 1, forward for stage 1, micro-batch 2, needs forward for"),
        # Each waits for the other.
        (
            [tasks("F0 B0 F1 B1", 0), tasks("F0 F1 B0 B1", 1)],
            "on device 0, backward for stage 0, micro-batch 0, needs backward for stage 1, micro-batch 0: schedule",
        ),
    ],
)
def test_a_schedule_that_cannot_proceed_is_refused(schedule: StepSchedule, task: str) -> None:
    with pytest.raises(ValueError, match=f"the schedule cannot proceed: every device waits for a task .*; {task}"):
        sequential(schedule)


@pytest.mark.parametrize(
    ("name", "num_stages", "stages_per_device", "message"),
    [
        ("gpipe", 4, 2, r"^stages_per_device is 2, but the schedule gpipe needs 1; change it, or use another"),
        ("1f1b", 4, 2, r"^stages_per_device is 2, but the schedule 1f1b needs 1; change it, or use"),
        ("interleaved_1f1b", 4, 1, r"^stages_per_device is 1, but the schedule interleaved_1f1b needs 2 or more;"),
        ("zb_v", 4, 1, r"^stages_per_device is 1, but the schedule zb_v needs 2; change it, or use"),
        ("zb_v", 5, 2, r"^5 partitions cannot be shared evenly"),
        ("interleaved_1f1b", 5, 2, r"^5 partitions cannot be shared evenly by devices with stages_per_device=2;"),
    ],
)
def test_a_number_of_stages_that_a_device_cannot_have_is_refused(
    name: str, num_stages: int, stages_per_device: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_stages_per_device(name, num_stages, stages_per_device)
    with pytest.raises(ValueError, match=message):
        SCHEDULES[name](num_stages, 4, ALWAYS, stages_per_device)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_drawings_have_each_task_at_its_moment(name: str) -> None:
    """A task takes a column, and begins as soon as it can."""
    rows = re.findall(r"^ +(?:stage|device) \d   (.*)$", inspect.getdoc(SCHEDULES[name]) or "", re.MULTILINE)
    num_devices, per_device = len(rows), STAGES_PER_DEVICE.get(name, (1, 1))[0]
    num_microbatches = 1 + max(map(int, re.findall(r"\d", rows[0])))
    mode = ALWAYS if "R" in rows[0] else NEVER
    schedule = SCHEDULES[name](per_device * num_devices, num_microbatches, mode, per_device)
    column = {event.task: round(event.start) for event in simulate(schedule, lambda _: 1.0).events}
    for own, row in zip(schedule, rows, strict=True):
        expected = [" " * 2] * (len(row) // 3 + 1)
        first = min(task.stage for task in own)
        for task in own:
            word = f"{LETTER_OF[task.kind]}{task.micro_batch}"
            expected[column[task]] = word if task.stage == first else word.lower()
        assert row == " ".join(expected), name
