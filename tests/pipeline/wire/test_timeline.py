"""The timeline of a step of several processes is that of its schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gpipe
from gpipe.pipeline.schedule import Rematerialize, dependencies
from gpipe.pipeline.schedules.choice import SCHEDULES
from gpipe.pipeline.timeline import Event, Timeline
from tests.pipeline.wire.mixed_layers import images, mean_output, mixed_layers, stages
from tests.support.process_pool import ProcessPool

MODES = ("always", "except_last", "never")


def record_timeline(rank: int, mode: str, schedule: str, stages_per_device: int) -> list[list[Any]]:
    num_stages = 3 * stages_per_device
    pipeline = gpipe.Pipeline(
        mixed_layers(), mean_output, [6 // num_stages] * num_stages, 4, rematerialize=mode, schedule=schedule,
        stages_per_device=stages_per_device, mesh=stages(3), timeout_seconds=10,
    )  # fmt: skip
    timeline = pipeline.train_step((images(4), torch.ones(4, 1)), record_timeline=True).timeline
    pipeline.close()
    assert timeline is not None and timeline.num_devices == 3
    return timeline.to_json()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "stages_per_device"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("split_gpipe", 1), ("zb_h1", 1), ("zb_v", 2)],
)
def test_a_timeline_has_every_task_once_in_an_order_that_the_schedule_allows(
    name: str, stages_per_device: int, mode: str, processes: ProcessPool
) -> None:
    first, *others = processes.run(3, record_timeline, mode, name, stages_per_device)
    assert all(rows == first for rows in others), "the processes disagree about the step"
    events = {event.task: event for event in Timeline.from_json(first, 3).events}
    schedule = SCHEDULES[name](3 * stages_per_device, 4, Rematerialize(mode), stages_per_device)
    by_start = sorted(events.values(), key=lambda event: event.start)
    for tasks in schedule:
        own = {task.stage for task in tasks}
        assert [event.task for event in by_start if event.task.stage in own] == tasks
    assert len(first) == len(events)
    assert min(event.start for event in by_start) == 0
    for event in by_start:
        assert event.start <= event.end
        for needed in dependencies(event.task, 3 * stages_per_device):
            assert _ends_before(events[needed], event), f"{event.task} began before {needed} was done"


def _ends_before(first: Event, second: Event) -> bool:
    return first.end <= second.start
