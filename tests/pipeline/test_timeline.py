"""A timeline counts, and survives files; a measured step has every task once."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import gpipe
from gpipe.pipeline.schedule import Kind, Rematerialize, Task
from gpipe.pipeline.schedule import gpipe as gpipe_schedule
from gpipe.pipeline.schedules.choice import SCHEDULES
from gpipe.pipeline.timeline import Event, Timeline
from gpipe.planning.simulation import simulate

F, R, B = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD
SECONDS = {F: 1.0, R: 1.0, B: 2.0}


def test_the_mean_of_a_kind_and_stage_is_that_of_its_micro_batches() -> None:
    events = (Event(Task(F, 0, 0), 0, 1), Event(Task(F, 0, 1), 1, 4), Event(Task(F, 1, 0), 1, 6))
    mean = Timeline(events, 2).mean_seconds()
    assert [mean(Task(F, 0, 7)), mean(Task(F, 1, 7))] == [2.0, 5.0]


def test_a_timeline_survives_json() -> None:
    timeline = simulate(gpipe_schedule(3, 2), lambda task: SECONDS[task.kind])
    read = Timeline.from_json(json.loads(json.dumps(timeline.to_json())), 3)
    assert set(read.events) == set(timeline.events)
    assert all(type(event.task.kind) is Kind for event in read.events)
    assert read.to_json() == timeline.to_json()
    assert read.bubble == pytest.approx(timeline.bubble, abs=1e-15)


def test_the_trace_has_one_complete_event_per_task(tmp_path: Path) -> None:
    timeline = simulate(gpipe_schedule(2, 3), lambda task: SECONDS[task.kind])
    timeline.write_trace(str(tmp_path / "trace.json"))
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [row for row in rows if row["ph"] == "X"]
    found = {(row["cat"], row["tid"], row["args"]["micro_batch"]): (row["ts"], row["dur"]) for row in complete}
    assert len(complete) == len(found) == len(timeline.events)
    for task, start, end in timeline.events:  # microseconds
        assert found[str(task.kind), task.stage, task.micro_batch] == (start * 1e6, (end - start) * 1e6)
    names = {row["tid"]: row["args"]["name"] for row in rows if row["ph"] == "M" and row["name"] == "thread_name"}
    assert names == {0: "stage 0", 1: "stage 1"}


def test_a_device_with_several_stages_has_one_row() -> None:
    schedule = SCHEDULES["interleaved_1f1b"](4, 2, Rematerialize.NEVER, 2)
    timeline = simulate(schedule, lambda task: SECONDS[task.kind] * (1 + task.stage))
    assert timeline.row_names() == ["stages 0, 2", "stages 1, 3"]
    assert timeline.busy_seconds(F) == [2 * (1 + 3), 2 * (2 + 4)]
    assert timeline.bubble == pytest.approx(1 - (24 + 36) / (2 * timeline.makespan_seconds))
    assert Timeline.from_json(timeline.to_json(), 2).busy_seconds() == timeline.busy_seconds()


@pytest.mark.parametrize("mode", Rematerialize)
@pytest.mark.parametrize(
    ("name", "stages_per_device"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("split_gpipe", 1), ("zb_h1", 1), ("zb_v", 2)],
)
def test_a_measured_step_has_every_task_once_in_the_order_of_the_schedule(
    name: str, stages_per_device: int, mode: Rematerialize
) -> None:
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.Identity())
    settings = {"rematerialize": str(mode), "schedule": name, "stages_per_device": stages_per_device}
    pipeline = gpipe.Pipeline(layers, nn.functional.cross_entropy, [1, 1, 1, 1], 4, **settings)
    batch = torch.randn(7, 4), torch.arange(7) % 3
    assert pipeline.train_step(batch).timeline is None
    timeline = pipeline.train_step(batch, record_timeline=True).timeline
    assert timeline is not None
    schedule = SCHEDULES[name](4, 4, mode, stages_per_device)
    assert timeline.num_devices == len(schedule)
    for row, tasks in enumerate(schedule):
        events = sorted(
            (event for event in timeline.events if timeline.row(event.task) == row), key=lambda event: event.start
        )
        assert [event.task for event in events] == tasks
    ordered = sorted(timeline.events, key=lambda event: event.start)
    assert ordered[0].start == 0.0
    assert all(before.end <= after.start for before, after in itertools.pairwise(ordered))  # one process, one at a time
    assert all(event.end >= event.start for event in ordered)
    assert 0 <= timeline.bubble < 1
