"""The folder of checkpoints: pointers, what is deleted, and what a killed process has left."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpipe import durable_files
from gpipe.checkpoint import folder
from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.folder import find_best, find_checkpoint, find_latest, find_run, publish
from gpipe.checkpoint.saver import Saver
from tests.checkpoint.conftest import POSITION
from tests.training.small_run import SmallRun, assert_equal, small_run


def test_there_is_no_latest_before_the_first_save(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "checkpoints") is None
    (tmp_path / "latest").write_text("../elsewhere\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"says '\.\./elsewhere', which names no checkpoint"):
        find_latest(tmp_path)


def test_where_latest_is_lost_the_last_complete_one_counts(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 100_000_001):
        (path := tmp_path / f"step-{step}").mkdir()
        if step != 100_000_001:
            (path / "manifest.json").touch()
    assert find_latest(tmp_path) == tmp_path / "step-100000000"


def test_only_the_newest_are_kept_and_latest_points_to_the_last(tmp_path: Path, trained: SmallRun) -> None:
    for step in (8, 9, 10, 100_000_000):
        path = trained.save(tmp_path, replace(POSITION, step=step), keep=2)
        assert find_latest(tmp_path) == path
    assert {entry.name for entry in tmp_path.iterdir()} == {"latest", "step-00000010", "step-100000000"}


def test_the_same_step_can_be_saved_again(tmp_path: Path, trained: SmallRun) -> None:
    trained.save(tmp_path, POSITION)
    trained.train(1)
    other = small_run((6,), seed=1)
    other.load(trained.save(tmp_path, POSITION))
    assert_equal(other, trained.tensors())
    assert {entry.name for entry in tmp_path.iterdir()} == {"latest", "step-00000003"}


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_that_before_latest_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []

    def note(owner: Any, name: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda path, *args: (done.append((name, path.name)), function(path, *args))[1])

    for owner, name in ((durable_files, "flush"), (folder, "flush"), (Path, "rename"), (Path, "replace")):
        note(owner, name)
    (partial := tmp_path / ".step-00000003.partial-0-1").mkdir()
    publish(partial, tmp_path / "step-00000003", keep=1, is_best=False)
    folder_named = [("flush", partial.name), ("rename", partial.name), ("flush", tmp_path.name)]
    latest_named = [("flush", ".partial.latest"), ("replace", ".partial.latest"), ("flush", tmp_path.name)]
    assert done == folder_named + latest_named


def test_a_checkpoint_that_is_being_deleted_no_longer_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, rmtree = [], shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **options: (names.append(path.name), rmtree(path, **options)))
    for name in ("step-00000001", ".step-00000001.deleted/what a disk kept", "partial"):
        (tmp_path / name).mkdir(parents=True)
    publish(tmp_path / "partial", tmp_path / "step-00000002", keep=1, is_best=False)
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step-00000002"}
    assert "step-00000001" not in names


def test_to_keep_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0, expected at least 1"):
        Saver(tmp_path, small_run().pipeline, keep=0)


def test_the_best_is_never_deleted(tmp_path: Path) -> None:
    run = small_run()
    saver = Saver(tmp_path, run.pipeline, keep=2)
    for step in range(1, 7):
        saver.save(run.content(replace(POSITION, step=step)), is_best=step in (1, 2))
    saver.wait()
    assert find_best(tmp_path) == tmp_path / "step-00000002"
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"latest", "best", "step-00000002", "step-00000005", "step-00000006"}
    saver.save(run.content(replace(POSITION, step=7)), is_best=True)
    saver.wait()
    assert not (tmp_path / "step-00000002").exists()


def test_checkpoints_of_later_steps_are_deleted_first(tmp_path: Path) -> None:
    run = small_run()
    for step in (10, 20, 30, 5, 6):
        run.save(tmp_path, replace(POSITION, step=step), keep=3)
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-00000005", "step-00000006", "step-00000030"}
    assert find_latest(tmp_path) == tmp_path / "step-00000006"


def test_leftovers_of_a_killed_process_are_removed_and_a_replaced_checkpoint_returns(tmp_path: Path) -> None:
    run = small_run()
    path = run.save(tmp_path, POSITION)
    path.rename(tmp_path / f".{path.name}.old")  # killed between two renames
    for rest in (".step-00000009.partial-0a1b2c3d-2", ".step-00000001.deleted"):
        (tmp_path / rest).mkdir()
    for _ in range(2):
        Saver(tmp_path, run.pipeline).rehearse(run.content(POSITION))
        assert {entry.name for entry in tmp_path.iterdir()} == {"latest", path.name}
        run.load(path)
        (tmp_path / f".{path.name}.old").mkdir(exist_ok=True)  # killed after both


def test_of_a_folder_of_runs_the_finished_one_that_saved_last_counts(tmp_path: Path) -> None:
    for name, seconds in (("b", 1), ("a", 2), ("c", None)):
        folder = tmp_path / name / "checkpoints"
        folder.mkdir(parents=True)
        if seconds is not None:
            (folder / "step-00000001").mkdir()
            (folder / "step-00000001" / "manifest.json").touch()
            os.utime(folder / "step-00000001" / "manifest.json", (seconds, seconds))
    assert find_run(tmp_path) == tmp_path / "a"
    for unchanged in (tmp_path / "b", tmp_path / "b" / "checkpoints", tmp_path / "nowhere"):
        assert find_run(unchanged) == unchanged
    assert find_checkpoint(tmp_path) == tmp_path / "a" / "checkpoints" / "step-00000001"
    assert find_checkpoint(tmp_path / "c") is None
    config = {"init_from": None, "trainer": {"resume_from": str(tmp_path / "b")}}
    for name in ("a", "b"):
        (tmp_path / name / "checkpoints" / "step-00000001" / "manifest.json").unlink()
    small_run().save(tmp_path / "b" / "checkpoints", POSITION)
    small_run().save(tmp_path / "a" / "checkpoints", POSITION, config=config)  # it began from "b", and goes on from it
    assert find_run(tmp_path) == tmp_path / "b"
    (tmp_path / "b" / "record.json").touch()  # "a" was interrupted
    assert find_run(tmp_path) == tmp_path / "b"
    (tmp_path / "a" / "record.json").touch()
    assert find_run(tmp_path) == tmp_path / "a"


def test_a_run_means_its_latest_or_its_best_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-0000000{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-0000000{step}" / "manifest.json").touch()
    latest = tmp_path / "checkpoints" / "step-00000002"
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path, prefer_best=True) == latest
    (tmp_path / "checkpoints" / "best").write_text("step-00000001\n")
    assert find_checkpoint(tmp_path) == find_checkpoint(latest, prefer_best=True) == latest
    best = tmp_path / "checkpoints" / "step-00000001"
    assert find_checkpoint(tmp_path, prefer_best=True) == find_checkpoint(tmp_path / "checkpoints" / "best") == best
