"""The same command again finds the run that it left unfinished."""

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hydra import compose

from gpipe.config import ConfigError, RunConfig, read_yaml, to_plain, to_run, to_yaml
from gpipe.programs.folder_lock import LOCK_FILE, FolderHeld, hold
from gpipe.programs.resume import clear, is_unfinished, resume_folder

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
    with resume_folder(run_of(), tmp_path / "5") as folder:
        assert folder == newest
        assert not (newest / "error.txt").exists() and not (tmp_path / "5").exists()
    said = capsys.readouterr().out
    assert said == f"resuming {newest}, an unfinished run with the same settings (trainer.resume=never starts anew)\n"


def test_one_that_has_saved_something_comes_before_a_newer_one_that_has_not(tmp_path: Path) -> None:
    saved = leave(tmp_path / "1")
    (saved / "checkpoints" / "step-00000002").mkdir(parents=True)
    leave(tmp_path / "2")
    with resume_folder(run_of(), tmp_path / "3") as folder:
        assert folder == saved


def test_one_that_ends_just_before_it_is_locked_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(tmp_path / "1")

    def hold_late(path: Path, **options: bool) -> AbstractContextManager[None]:
        (tmp_path / "1" / "record.json").touch()
        return hold(path, **options)

    monkeypatch.setattr("gpipe.programs.resume.hold", hold_late)
    with resume_folder(run_of(), tmp_path / "2") as folder:
        assert folder == tmp_path / "2"


def test_one_with_another_number_of_stages_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path / "1")  # without a checkpoint there is no state to start from
    saved = leave(tmp_path / "2")
    for other in (saved, leave(tmp_path / "3", "seed=1"), finished := leave(tmp_path / "3b")):
        (other / "checkpoints" / "step-00000002").mkdir(parents=True)
    (finished / "record.json").touch()
    with resume_folder(run_of("pipeline.num_stages=3"), tmp_path / "4") as folder:
        assert folder == tmp_path / "4"
    said = capsys.readouterr().out
    assert said.startswith(f"{saved} is unfinished, but pipeline.num_stages is 2 there, 3 here: this run is a new one")
    assert said.endswith(f"(trainer.resume_from={saved} starts from its state)\n")
    with resume_folder(run_of("pipeline.num_stages=3", f"trainer.resume_from={saved}"), tmp_path / "4"):
        assert capsys.readouterr().out == ""
    (saved / LOCK_FILE).mkdir()  # as little ours to open as another user's
    with resume_folder(run_of("pipeline.num_stages=3"), tmp_path / "4"):
        assert capsys.readouterr().out == ""


def test_one_that_still_runs_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path / "1")
    with resume_folder(run_of(), tmp_path / "2") as first, resume_folder(run_of(), tmp_path / "3") as second:
        assert (first, second) == (tmp_path / "1", tmp_path / "3")
    assert f"{tmp_path / '1'} is in use by process {os.getpid()} on " in capsys.readouterr().out
    with resume_folder(run_of(), tmp_path / "4") as third:
        assert third == tmp_path / "1"


def test_runs_that_begin_in_the_same_second_have_a_folder_each(tmp_path: Path) -> None:
    (tmp_path / "now").mkdir()  # by Hydra, for all of them
    with (
        resume_folder(run_of(), tmp_path / "now") as first,
        resume_folder(run_of("seed=1"), tmp_path / "now") as second,
        resume_folder(run_of(), tmp_path / "now") as third,
    ):
        assert [path.name for path in (first, second, third)] == ["now", "now-2", "now-3"]
        (first / "config.yaml").write_text(to_yaml(run_of()))
        (first / "record.json").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["now"], "what stays empty is removed"
    with resume_folder(run_of(), tmp_path / "now") as later:
        assert later.name == "now-2", "one that is finished within the second keeps its folder"


def forked(function: Callable[[], object]) -> int:
    """Call a function in a process of its own, and return its id; it exits with 0 where the function returns."""
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def test_of_many_that_meet_each_has_a_folder(tmp_path: Path) -> None:
    run = run_of()

    def leave_something() -> None:
        with resume_folder(run, tmp_path / "now") as folder:
            (folder / "only me").open("x").close()

    children = [forked(leave_something) for _ in range(12)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)
    assert len(list(tmp_path.glob("now*/only me"))) == len(children)


def test_a_folder_is_free_once_its_holder_is_dead_though_a_process_forked_by_it_lives(tmp_path: Path) -> None:
    ready, says = os.pipe()

    def hold_and_fork() -> None:
        with hold(tmp_path):
            loader = forked(signal.pause)
            os.write(says, f"{loader}".encode())
            signal.pause()

    holder = forked(hold_and_fork)
    loader = int(os.read(ready, 20))
    with pytest.raises(FolderHeld, match=f"in use by process {holder} on "), hold(tmp_path):
        pass
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    with hold(tmp_path):
        os.kill(loader, signal.SIGKILL)
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_folder_that_the_user_names_is_held_by_one_run(tmp_path: Path) -> None:
    with resume_folder(run_of(), tmp_path / "mine", is_dated=False) as folder:
        assert folder == tmp_path / "mine"
        with (
            pytest.raises(ConfigError, match=rf"mine is in use by process {os.getpid()} on .*hydra\.run\.dir"),
            resume_folder(run_of(), folder, is_dated=False),
        ):
            pass
        (tmp_path / "other").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["other"], "what stays empty is removed"


def test_a_folder_with_nothing_but_checkpoints_has_a_run_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    refused = pytest.raises(ConfigError, match=r"has a run, and trainer\.resume is never")
    with refused, resume_folder(run_of("trainer.resume=never"), tmp_path, is_dated=False):
        pass


def test_a_folder_whose_settings_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: [")
    refused = pytest.raises(ConfigError, match=r"has a run of other settings \(its config\.yaml cannot be read\): set")
    with refused, resume_folder(run_of(), tmp_path, is_dated=False):
        pass


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (["seed=1", "trainer.max_steps=5"], r"\(seed is 0 there, 1 here; trainer.max_steps is null there, 5 here\)"),
        (["data.root=elsewhere"], r"data.root is null there, elsewhere here"),
        (["trainer.resume_from=another"], r"trainer.resume_from is null there, another here"),
        (["trainer.resume=never"], "trainer.resume is never"),
        (["record"], "is finished"),
    ],
)
def test_a_folder_that_the_user_names_has_one_run(tmp_path: Path, then: list[str], said: str) -> None:
    folder = leave(tmp_path / "mine")
    if then == ["record"]:
        (folder / "record.json").touch()
        then = []
    before = sorted(folder.iterdir())
    with pytest.raises(ConfigError, match=said), resume_folder(run_of(*then), folder, is_dated=False):
        pass
    assert sorted(folder.iterdir()) == before


def test_a_folder_that_the_user_names_goes_on_with_the_same_settings(tmp_path: Path) -> None:
    leave(tmp_path / "newer")
    folder = leave(tmp_path / "mine")
    for run in (run_of(), run_of("trainer.dry_run=true", "seed=1")):  # a plan of other settings disturbs nothing
        with resume_folder(run, folder, is_dated=False) as at:
            assert at == folder


def test_the_settings_leave_a_folder_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = leave(tmp_path / "job", "seed=1")

    def fail_but_for_settings(path: Path, target: Path) -> None:
        if path.name != "config.yaml":
            raise KeyboardInterrupt
        path.replace(target)

    monkeypatch.setattr(Path, "rename", fail_but_for_settings)
    (folder / "metrics.jsonl").touch()
    with pytest.raises(KeyboardInterrupt):
        clear(folder, run_of())
    assert (folder / "config.yaml").exists(), "the next start moves the rest"


@pytest.mark.parametrize("override", ["trainer.resume=never", "trainer.dry_run=true"])
def test_a_run_may_start_anew(tmp_path: Path, override: str) -> None:
    leave(tmp_path / "1")
    with resume_folder(run_of(override), tmp_path / "2") as folder:
        assert folder == tmp_path / "2"


def test_of_torchruns_processes_the_first_one_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(tmp_path / "1")
    monkeypatch.setenv("RANK", "1")
    with resume_folder(run_of(), tmp_path) as folder:
        assert folder == tmp_path


@pytest.mark.parametrize(
    ("override", "is_same"),
    [
        ("launch=process_per_stage", True),
        ("data.num_workers=7", True),
        ("tracking=disabled", True),
        ("pipeline.partitions=[1,8]", True),
        ("pipeline.timeout_seconds=7", True),
        ("trainer.checkpoints.every_steps=7", True),
        ("trainer.max_hours=7", True),
        ("trainer.non_finite.action=skip", True),
        ("pipeline.num_stages=3", False),
        ("pipeline.num_microbatches=3", False),
        ("trainer.num_epochs=7", False),
        ("trainer.evaluation.every_epochs=7", False),
        ("data=digits", False),
        ("data.root=elsewhere", False),
        ("trainer.resume_from=another", False),
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


def test_the_root_of_the_disk_is_no_runs_folder() -> None:
    refused = pytest.raises(ConfigError, match=r"hydra.run.dir is /, expected a folder of the run's own")
    with refused, resume_folder(run_of(), Path("/"), is_dated=False):
        pass
