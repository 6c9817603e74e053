"""The tasks of a step, read from the trace that a run leaves."""

from pathlib import Path

import pytest

from experiments.step_timeline import read_events
from gpipe.pipeline.schedule import Rematerialize, gpipe
from gpipe.pipeline.timeline import Event, Timeline
from gpipe.planning.simulation import simulate


def test_a_trace_gives_back_the_tasks_from_the_first_one_on(tmp_path: Path) -> None:
    step = simulate(gpipe(2, 3, Rematerialize.ALWAYS), lambda task: 0.01 * (1 + task.stage))
    later = Timeline(tuple(Event(task, start + 5.0, end + 5.0) for task, start, end in step.events), 2)
    later.write_trace(tmp_path / "timeline.json")
    found = Timeline.from_json(read_events(tmp_path / "timeline.json"), 2)
    expected, seen = ({event.task: event[1:] for event in timeline.events} for timeline in (step, found))
    assert seen.keys() == expected.keys()
    for task, times in seen.items():
        assert times == pytest.approx(expected[task], abs=1e-6)
