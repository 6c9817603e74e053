"""A checkpoint goes on with the training that it is of: what differs is refused by name, before anything is written."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hydra import compose

from gpipe.checkpoint.content import Content
from gpipe.checkpoint.folder import find_run
from gpipe.checkpoint.manifest import MANIFEST, Position, seal, write_manifest
from gpipe.config import ConfigError, RunConfig, to_plain, to_run, to_yaml
from gpipe.launch import processes
from gpipe.programs.build import build_tracker
from gpipe.programs.resume import name_runs
from gpipe.programs.train import launch_training
from tests.support.train_program import TINY

pytestmark = pytest.mark.usefixtures("composer")


def run_of(*overrides: str) -> RunConfig:
    return to_run(compose("train", overrides=[*TINY, *overrides]))


def leave(folder: Path, *overrides: str, results: dict[str, int] | None = None) -> Path:
    """Leave the settings and a checkpoint of a run, as far as they are read before its tensors."""
    run = run_of(*overrides)
    position = Position(step=2, epoch=0, batch=2, seed=run.seed)
    checkpoint = folder / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    write_manifest(
        checkpoint, Content(position, {}, config=to_plain(run), results=results or {}).describe(num_layers=9), {}
    )
    (checkpoint.parent / "latest").write_text(f"{checkpoint.name}\n")
    (folder / "config.yaml").write_text(to_yaml(run))
    return folder


def fail(run: RunConfig, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Start a run that fails, and return what it says."""
    with pytest.raises(SystemExit) as end:
        launch_training(run, folder, [])
    assert end.value.code == 1
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.root=elsewhere", "data.root is null there, elsewhere here"),
        ("trainer.max_steps=5", "trainer.max_steps is 3 there, 5 here"),
        ("optimizer.learning_rate=0.5", "optimizer.learning_rate is 0.003 there, 0.5 here"),
        ("trainer.resume_from={other}", "trainer.resume_from is null there, "),
    ],
)
def test_a_folder_with_checkpoints_of_other_settings_is_refused_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    folder = leave(tmp_path / "run")
    before = (folder / "config.yaml").read_text()
    message = fail(run_of(override.format(other=leave(tmp_path / "other"))), folder, capsys)
    assert f"error: {folder} has checkpoints that were trained with other settings ({said}" in message
    assert (folder / "config.yaml").read_text() == before


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.root=elsewhere", "data.root is null there, elsewhere here"),
        ("seed=1", "seed is 0 there, 1 here"),
        ("trainer.batch_size=32", "trainer.batch_size is 16 there, 32 here"),
        ("optimizer.weight_decay=0.5", "optimizer.weight_decay is 0.05 there, 0.5 here"),
    ],
)
def test_a_run_goes_on_from_none_of_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    other = leave(tmp_path / "other")
    (tmp_path / "run").mkdir()
    message = fail(run_of(override, f"trainer.resume_from={other}"), tmp_path / "run", capsys)
    assert f"error: trainer.resume_from is {other}, which was trained with other settings ({said})" in message


@pytest.mark.parametrize(
    "override",
    ["trainer.max_steps=9", "pipeline.num_stages=3", "optimizer.learning_rate=0.5", "schedule.name=constant"],
)
def test_a_run_that_goes_on_from_another_has_a_length_and_a_learning_rate_of_its_own(
    tmp_path: Path, override: str
) -> None:
    launch_training(
        run_of(override, f"trainer.resume_from={leave(tmp_path / 'other')}", "trainer.dry_run=true"), tmp_path, []
    )


@pytest.mark.parametrize("setting", ["init_from", "trainer.resume_from"])
def test_a_run_with_a_checkpoint_of_its_own_goes_on_without_the_one_that_it_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    run, folder = run_of(f"{setting}=gone"), leave(tmp_path / "run", f"{setting}=gone")
    started: list[tuple[object, ...]] = []
    monkeypatch.setattr(processes, "run", lambda *arguments: started.append(arguments))
    launch_training(run, folder, [])
    assert len(started) == 1
    with build_tracker(run, folder, [], enabled=False):
        assert f"error: {setting} is gone, which has no checkpoint" in fail(run, tmp_path / "other", capsys)


def test_a_run_that_would_end_at_once_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = leave(tmp_path / "other")
    message = fail(run_of("trainer.max_steps=2", f"trainer.resume_from={other}"), tmp_path, capsys)
    said = f"trainer.resume_from is {other}, which has finished step 2: nothing is left to train with "
    assert message == f"error: {said}trainer.max_steps=2: raise it.\n"


def test_a_run_that_ended_by_patience_is_gone_on_from(tmp_path: Path) -> None:
    other = leave(tmp_path / "other", "trainer.evaluation.patience=1", results={"num_worse": 1})
    words = ("trainer.evaluation.patience=1", f"trainer.resume_from={other}", "trainer.dry_run=true")
    launch_training(run_of(*words), tmp_path, [])


def test_the_run_that_a_folder_of_runs_means_is_in_the_settings(tmp_path: Path) -> None:
    other = leave(tmp_path / "runs" / "other")
    run = name_runs(run_of(f"trainer.resume_from={tmp_path / 'runs'}", f"init_from={tmp_path / 'runs'}"))
    assert (run.trainer.resume_from, run.init_from) == (str(other), str(other))
    assert name_runs(run_of()) == run_of()


def test_the_jobs_of_a_sweep_start_from_the_run_that_the_first_one_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = run_of(f"init_from={tmp_path / 'runs'}")
    first = leave(tmp_path / "runs" / "first")
    (tmp_path / "sweep").mkdir()
    assert name_runs(named, tmp_path / "sweep").init_from == str(first)
    newer = leave(tmp_path / "runs" / "newer")
    assert name_runs(named).init_from == str(newer)
    assert name_runs(named, tmp_path / "sweep").init_from == str(first)
    assert f"is {first}, from which this sweep started, not the newer {newer}: name" in capsys.readouterr().out
    first.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"is {first} in this sweep, which no longer exists, .* or name {newer} to "):
        name_runs(named, tmp_path / "sweep")


def test_a_start_that_a_killed_job_wrote_in_part_counts_for_none(tmp_path: Path) -> None:
    found = leave(tmp_path / "runs" / "found")
    (tmp_path / "started_from.txt").write_text(f'["{tmp_path / "runs"}", "{tmp_path / "runs"}/f')
    named = run_of(f"init_from={tmp_path / 'runs'}")
    assert name_runs(named, tmp_path).init_from == str(found)
    leave(tmp_path / "runs" / "newer")
    assert name_runs(named, tmp_path).init_from == str(found)
    assert len((tmp_path / "started_from.txt").read_text().split()) > 2


def test_what_an_older_program_did_not_save_is_no_difference(tmp_path: Path) -> None:
    folder = leave(tmp_path / "other")
    path = folder / "checkpoints" / "step-00000002" / MANIFEST
    content = json.loads(path.read_text())
    del content["config"]["ema"], content["config"]["trainer"]["compile"]
    path.write_text(json.dumps(seal(content)))
    launch_training(run_of(f"trainer.resume_from={folder}", "trainer.dry_run=true"), tmp_path, [])


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond a few bytes."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def test_a_full_disk_leaves_the_settings_by_which_the_run_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = leave(tmp_path / "run")
    before = sorted(path.name for path in folder.iterdir())
    with full_disk():
        message = fail(run_of(), folder, capsys)
    remedy = "make room there, or raise the limit, and start the same command again."
    assert message.startswith(f"error: {folder / 'config.yaml'} cannot be written (File too large): {remedy}\n")
    assert (folder / "config.yaml").read_text() == to_yaml(run_of())
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_checkpoint_is_found_without_the_pointer_to_it(tmp_path: Path) -> None:
    folder = leave(tmp_path / "run")
    (folder / "checkpoints" / "latest").unlink()
    assert find_run(tmp_path) == folder
    launch_training(run_of(f"trainer.resume_from={folder}", "trainer.dry_run=true"), tmp_path, [])
