"""With launch.max_restarts a run goes on by itself from its last checkpoint, as if nothing had been."""

import json
import re
from pathlib import Path

import pytest

from tests.reliability.test_faults import RUN, assert_ended, run_with
from tests.reliability.test_many_hosts import results

pytestmark = pytest.mark.reliability


def log_lines(run: Path) -> list[tuple[int, str]]:
    """Return the steps of a run's log, with what each line is about, in its order."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], "loss" if "loss" in line else "evaluation") for line in lines if "epoch" in line]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "damage").write_text("0")
    assert run_with(folder, -1, "forward", "none", *RUN, may_go_on=True).status == 0
    return folder / "run"


@pytest.mark.xdist_group("undisturbed")
@pytest.mark.parametrize(("action", "place"), [("kill", "forward"), ("raise", "save")])
def test_a_run_that_is_restarted_ends_as_the_undisturbed_one(
    action: str, place: str, undisturbed: Path, tmp_path: Path
) -> None:
    ended = run_with(tmp_path, 1, place, action, *RUN, "launch.max_restarts=1", may_go_on=True)
    assert ended.status == 0, ended.said
    assert "start again (restart 1 of launch.max_restarts=1)" in ended.said
    expected, expected_log = results(undisturbed)
    found, log = results(tmp_path / "run")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].equal(tensor), name
    assert log == expected_log
    assert log_lines(tmp_path / "run") == log_lines(undisturbed)
    assert [step for step, kind in log_lines(undisturbed) if kind == "loss"] == [1, 2, 3, 4, 5, 6]


def test_after_the_last_restart_the_run_ends_with_the_cause(tmp_path: Path) -> None:
    more = ("launch.max_restarts=2", "launch.num_processes=1", "pipeline.num_stages=1")
    ended = run_with(tmp_path, 0, "loading", "raise", *RUN, *more, times=9, may_go_on=True)
    assert_ended(ended, ["on purpose"])
    assert re.findall(r"restart (\d) of launch\.max_restarts=2", ended.said) == ["1", "2"]


def test_one_process_that_exits_too_early_is_an_error(tmp_path: Path) -> None:
    alone = ("launch.max_restarts=1", "launch.num_processes=1", "pipeline.num_stages=1")
    ended = run_with(tmp_path, 0, "loading", "exit", *RUN, *alone, times=9, may_go_on=True)
    assert_ended(
        ended, [r"process \d+ \(rank 0\) ended with exit status 0: something in it exited before the training"]
    )
