"""The same command again finds the run that it left unfinished."""

from pathlib import Path

import pytest
from hydra import compose

from gpipe.config import RunConfig, read_yaml, to_plain, to_run, to_yaml
from gpipe.resume import continued, is_unfinished

pytestmark = pytest.mark.usefixtures("composer")


def run_of(*overrides: str) -> RunConfig:
    return to_run(compose("train", overrides=[*overrides]))


def leave(folder: Path, *overrides: str) -> Path:
    """Leave what a run has that was killed."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(run_of(*overrides)))
    (folder / "error.txt").touch()
    return folder


def test_the_newest_unfinished_one_of_the_same_settings_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(tmp_path / "1")
    newest = leave(tmp_path / "2")
    leave(tmp_path / "3", "seed=1")
    (leave(tmp_path / "4") / "record.json").touch()
    with continued(run_of(), tmp_path / "5") as folder:
        assert folder == newest
        assert not (newest / "error.txt").exists() and not (tmp_path / "5").exists()
    said = capsys.readouterr().out
    assert said == f"going on in {newest}, which has the same settings and no end (trainer.resume=never starts anew)\n"


def test_one_that_still_runs_is_left_alone(tmp_path: Path) -> None:
    leave(tmp_path / "1")
    with continued(run_of(), tmp_path / "2") as first, continued(run_of(), tmp_path / "3") as second:
        assert (first, second) == (tmp_path / "1", tmp_path / "3")
    with continued(run_of(), tmp_path / "4") as third:
        assert third == tmp_path / "1"


@pytest.mark.parametrize("override", ["trainer.resume=never", "trainer.dry_run=true"])
def test_a_run_may_start_anew(tmp_path: Path, override: str) -> None:
    leave(tmp_path / "1")
    with continued(run_of(override), tmp_path / "2") as folder:
        assert folder == tmp_path / "2"


def test_of_torchruns_processes_the_first_one_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(tmp_path / "1")
    monkeypatch.setenv("RANK", "1")
    with continued(run_of(), tmp_path) as folder:
        assert folder == tmp_path


@pytest.mark.parametrize(
    ("override", "is_same"),
    [
        ("launch=process_per_stage", True),
        ("data.num_workers=7", True),
        ("tracking=disabled", True),
        ("pipeline.partitions=[1,8]", True),
        ("pipeline.timeout_seconds=7", True),
        ("trainer.save_every_steps=7", True),
        ("trainer.max_hours=7", True),
        ("trainer.non_finite=skip", True),
        ("pipeline.num_stages=3", False),
        ("pipeline.num_microbatches=3", False),
        ("trainer.num_epochs=7", False),
        ("trainer.evaluate_every_epochs=7", False),
        ("data=digits", False),
    ],
)
def test_what_changes_no_result_may_differ(tmp_path: Path, override: str, is_same: bool) -> None:
    assert is_unfinished(leave(tmp_path / "1", override), run_of()) == is_same


@pytest.mark.parametrize("text", ["", "- a\n", "a: [", "name: other\n", "\0"])
def test_a_file_that_has_no_settings_is_no_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert not is_unfinished(tmp_path, run_of())


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    leave(tmp_path / "1")
    assert read_yaml(tmp_path / "1" / "config.yaml") == to_plain(run_of())
