"""metrics.jsonl is valid JSON, line by line; W&B mirrors it without an account."""

import json
import math
from pathlib import Path

import pytest

from gpipe.training.tracking import METRICS_FILE, Tracker, jsonable


def read_lines(folder: Path) -> list[dict[str, object]]:
    """Parse the log strictly: NaN and Infinity are no JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_each_line_is_there_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    with Tracker(tmp_path, mode="disabled") as tracker:
        tracker.log({"step": 1, "epoch": 0, "loss": 2.5})
        assert read_lines(tmp_path) == [{"step": 1, "epoch": 0, "loss": 2.5}]
        tracker.log({"step": 2, "test/top1": 0.5})
    assert read_lines(tmp_path)[1] == {"step": 2, "test/top1": 0.5}


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    with Tracker(tmp_path, mode="disabled") as tracker:
        tracker.log({"step": 1, "loss": math.nan, "norms": [1.0, math.inf], "more": {"x": -math.inf}})
    assert read_lines(tmp_path) == [{"step": 1, "loss": None, "norms": [1.0, None], "more": {"x": None}}]


def test_a_resumed_run_continues_without_gaps_or_repeats(tmp_path: Path) -> None:
    with Tracker(tmp_path, mode="disabled") as tracker:
        for step in range(1, 6):
            tracker.log({"step": step, "loss": 1.0})
    with (tmp_path / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write('{"step": 6, "lo')
    with Tracker(tmp_path, mode="disabled") as tracker:
        tracker.rewind(3)
        tracker.log({"step": 4, "loss": 2.0})
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3, 4]


def test_only_the_enabled_process_writes(tmp_path: Path) -> None:
    with Tracker(tmp_path / "run", enabled=False) as tracker:
        tracker.log({"step": 1})
        tracker.rewind(0)
    assert not (tmp_path / "run").exists()


def test_wandb_offline_needs_no_account_and_stays_in_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    with Tracker(run, mode="offline", group="experiment", name="test", config={"seed": 1}) as tracker:
        tracker.log({"step": 1, "loss": 1.0})
        tracker.log({"step": 1, "test/top1": 0.5})
    assert len(read_lines(run)) == 2
    assert list((run / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_values_without_a_step_are_refused(tmp_path: Path) -> None:
    with Tracker(tmp_path, mode="disabled") as tracker, pytest.raises(ValueError, match="lack 'step'"):
        tracker.log({"loss": 1.0})


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'dryrun': choose one of offline, online, disabled"):
        Tracker(tmp_path, mode="dryrun")


def test_integers_and_text_stay_as_they_are() -> None:
    assert jsonable({"a": 1, "b": "nan", "c": True, "d": None}) == {"a": 1, "b": "nan", "c": True, "d": None}
