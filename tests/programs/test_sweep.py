"""A job of a sweep is done once, goes on where it was cut short, and says why it could not be done."""

import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from omegaconf import OmegaConf

from gpipe.config import RunConfig, to_plain, to_run, to_yaml
from gpipe.data import DataMissing
from gpipe.launch import devices
from gpipe.planning.accelerator import ACCELERATORS
from gpipe.programs.folder_lock import LOCK_FILE, hold
from gpipe.programs.jobs import (
    OUTCOME_FILE,
    SUMMARY_FILE,
    Outcome,
    SweepJob,
    describe_best,
    read_jobs,
    summarize,
    write_outcome,
)
from gpipe.programs.precision import settle_precision
from gpipe.programs.sweep import SweepEnd, run_job
from gpipe.records import RECORD_FILE, make_record, write_record

pytestmark = pytest.mark.usefixtures("composer")
OVERRIDES = ["data=digits", "seed=3"]


def run_of(*overrides: str) -> RunConfig:
    return to_run(compose("train", overrides=[*OVERRIDES, *overrides]))


class Training:
    """Leaves the files of a training in its folder, or those of one that failed or was cut short."""

    def __init__(self, end: str = "done", top1: float = 0.75, error: str = "") -> None:
        self.end, self.top1, self.error = end, top1, error
        self.resumed_from: list[str | None] = []

    def __call__(self, run: RunConfig, folder: Path, overrides: list[str]) -> None:
        self.resumed_from.append(run.trainer.resume_from)
        (folder / "config.yaml").write_text(to_yaml(run))
        if self.end == "cut short":
            (folder / "checkpoints").mkdir(exist_ok=True)
            (folder / "checkpoints" / "latest").write_text("step-00000001\n")
            raise SystemExit(130)
        if self.end == "failed":
            (folder / "error.txt").write_text(self.error)
            raise SystemExit(1)
        record = make_record(
            kind="measured", command="x", experiment=run.name, seed=run.seed,
            config=to_plain(settle_precision(run, ACCELERATORS["cpu"])),
            results={"top1": self.top1, "seconds": 90.0, "images_per_second": 12.0},
        )  # fmt: skip
        write_record(folder / RECORD_FILE, record)


def outcome_in(folder: Path) -> Outcome:
    (job,) = read_jobs(folder.parent)
    return job.outcome


def write_job(
    folder: Path, outcome: Outcome, results: dict[str, Any] | None = None, config: dict[str, Any] | None = None
) -> None:
    """Write the files of a job that has ended, with the record of its results if it has any."""
    folder.mkdir()
    write_outcome(folder, outcome)
    if results is not None:
        record = make_record(kind="measured", command="", experiment="", config=config or {}, seed=0, results=results)
        write_record(folder / RECORD_FILE, record)


def cells_in(folder: Path) -> list[list[str]]:
    """Return the lines of a sweep's table, cut into cells."""
    lines = (folder / SUMMARY_FILE).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "data=digits,seed=3"
    path.mkdir()
    return path


def test_a_job_returns_its_top1_and_is_not_done_again(folder: Path) -> None:
    training = Training()
    for _ in range(2):
        assert run_job(folder, OVERRIDES, "digits", run_of, training) == 0.75
    assert training.resumed_from == [None]
    assert outcome_in(folder) == Outcome("done", OVERRIDES, "digits")


@pytest.mark.parametrize(
    "word", ["trainer.autocast=auto", "trainer.evaluation.autocast=auto", "trainer.channels_last=null"]
)
def test_what_is_left_to_the_device_is_no_other_job(folder: Path, word: str) -> None:
    training = Training()
    for _ in range(2):
        assert run_job(folder, OVERRIDES, "digits", lambda: run_of(word), training) == 0.75
    assert len(training.resumed_from) == 1


def test_where_it_runs_and_what_watches_it_is_no_other_job(folder: Path) -> None:
    training = Training()
    run_job(folder, OVERRIDES, "digits", run_of, training)
    run_job(folder, OVERRIDES, "digits", lambda: run_of("launch=process_per_stage", "tracking=disabled"), training)
    assert len(training.resumed_from) == 1


@pytest.mark.parametrize("word", ["trainer.num_epochs=9", "data.root=elsewhere"])
def test_other_settings_are_trained_anew_and_the_old_files_set_aside(folder: Path, word: str) -> None:
    run_job(folder, OVERRIDES, "digits", run_of, Training())
    assert run_job(folder, OVERRIDES, "digits", lambda: run_of(word), Training(top1=0.5)) == 0.5
    (aside,) = (folder.parent / "set_aside").iterdir()
    assert json.loads((aside / RECORD_FILE).read_text())["results"]["top1"] == 0.75
    assert not (aside / LOCK_FILE).exists(), "the folder stays locked"
    assert [job.folder for job in read_jobs(folder.parent)] == [folder]


def test_a_job_that_was_cut_short_goes_on_from_its_checkpoint(folder: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_job(folder, OVERRIDES, "digits", run_of, Training("cut short"))
    assert stopped.value.code == 130, "Ctrl-C ends the whole sweep"
    assert read_jobs(folder.parent) == []
    for name in ("metrics.jsonl", "error.txt"):
        (folder / name).touch()
    assert run_job(folder, OVERRIDES, "digits", run_of, Training()) == 0.75
    assert not (folder / "error.txt").exists(), "it would silence the next error"
    assert (folder / "metrics.jsonl").exists() and not (folder.parent / "set_aside").exists()


def test_a_job_may_be_made_to_start_anew(folder: Path) -> None:
    with pytest.raises(SystemExit):
        run_job(folder, OVERRIDES, "digits", run_of, Training("cut short"))
    run_job(folder, OVERRIDES, "digits", lambda: run_of("trainer.resume=never"), Training())
    (aside,) = (folder.parent / "set_aside").iterdir()
    assert (aside / "checkpoints" / "latest").exists() and not (folder / "checkpoints").exists()


def test_a_job_that_another_process_does_is_left_to_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hold(folder):
        assert run_job(folder, OVERRIDES, "digits", run_of, Training()) is None
    assert list(folder.iterdir()) == []
    said = capsys.readouterr().out
    assert said.startswith(f"\nleft out: data=digits seed=3: {folder} is in use by process {os.getpid()} on ")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("error: the layers do not fit\n\nTraceback ...", "the layers do not fit"),
        ("", "see its message above"),  # all that a full disk leaves
    ],
)
def test_a_job_that_failed_says_why_lets_the_others_go_on_and_is_tried_again(
    folder: Path, error: str, reason: str
) -> None:
    open_run = lambda: run_of("trainer.autocast=auto", "trainer.channels_last=null", "launch.device=cpu")  # noqa: E731
    assert run_job(folder, OVERRIDES, "digits", open_run, Training("failed", error=error)) == -math.inf
    settled = to_plain(settle_precision(open_run(), ACCELERATORS["cpu"]))
    assert outcome_in(folder) == Outcome("failed", OVERRIDES, "digits", reason, settled)
    assert run_job(folder, OVERRIDES, "digits", run_of, Training()) == 0.75
    assert outcome_in(folder).status == "done"


def test_a_job_that_fails_because_its_device_is_missing_lets_the_others_go_on(folder: Path) -> None:
    open_run = lambda: run_of("launch.device=cuda", "trainer.dry_run=true")  # noqa: E731
    assert run_job(folder, OVERRIDES, "digits", open_run, Training("failed", error="error: no GPU")) == -math.inf
    assert outcome_in(folder).status == "failed"


def test_missing_data_is_no_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check() -> RunConfig:
        raise DataMissing("The image set cifar10 is missing.\nLooked for: ...")

    assert run_job(folder, OVERRIDES, "cifar10", check, Training()) == -math.inf
    assert outcome_in(folder) == Outcome("not run", OVERRIDES, "cifar10", "data missing")
    assert capsys.readouterr().out == "\nnot run: data=digits seed=3: data missing\n"


def test_too_few_devices_are_no_failure_and_the_job_tells_its_settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "own_cores", lambda: [0, 1])
    pinned = ("launch=process_per_stage", "launch.pin_cores=true", "launch.device=cpu")
    jobs = {num_stages: folder.parent / f"stages={num_stages}" for num_stages in (1, 2, 8)}
    for num_stages, place in jobs.items():
        place.mkdir()
        overrides = [f"pipeline.num_stages={num_stages}"]
        run_job(place, overrides, "digits", lambda: run_of(*pinned, *overrides), Training())  # noqa: B023
    small, medium, large = (job.outcome for job in read_jobs(folder.parent))
    assert [small.status, medium.status] == ["done", "done"]
    assert (large.status, large.reason) == ("not run", "needs 8 cores, 2 are here")
    assert large.config is not None and large.config["pipeline"]["num_stages"] == 8
    assert "not run: pipeline.num_stages=8: needs 8 cores, 2 are here" in capsys.readouterr().out
    for words, num_cores in ((["trainer.dry_run=true"], 2), ([], 8), ([], 2)):  # at last it is done already
        monkeypatch.setattr(devices, "own_cores", lambda: range(num_cores))  # noqa: B023
        open_run = lambda: run_of(*pinned, "pipeline.num_stages=8", *words)  # noqa: B023, E731
        assert run_job(jobs[8], ["pipeline.num_stages=8"], "digits", open_run, Training()) == 0.75


def test_the_table_of_speeds_has_the_figures_that_there_are_and_a_narrow_terminal_the_first_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for num_stages, bubble in ((1, None), (2, 0.25)):
        results = {
            "top1": None, "evaluation": {}, "examples_per_second": 12.345, "step_seconds": 0.98765, "bubble": bubble,
            "equal_stages_bubble": (num_stages - 1) / 5, "peak_memory_bytes": 3 * 2**20, "seconds": 30.0,
        }  # fmt: skip
        name = f"stages={num_stages}"
        write_job(tmp_path / name, Outcome("done", [name], "noise"), results)
    summarize(tmp_path, read_jobs(tmp_path))
    cells = cells_in(tmp_path)
    names = ["examples/s", "s per step, data apart", "bubble", "bubble, equal stages", "MiB, peak", "minutes"]
    assert cells[0] == ["stages", *names, "outcome", "folder"]
    assert cells[2:] == [
        ["1", "12.35", "0.988", "", "0.0%", "3", "0.5", "done", "stages=1"],
        ["2", "12.35", "0.988", "25.0%", "20.0%", "3", "0.5", "done", "stages=2"],
    ]
    capsys.readouterr()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    summarize(tmp_path, read_jobs(tmp_path))
    assert cells_in(tmp_path) == cells, "the file has all figures"
    printed = capsys.readouterr().out.splitlines()
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed if line.startswith("|")]
    assert shown[0] == ["stages", "examples/s", "s per step, data apart", "bubble", "outcome", "folder"]
    assert all(len(line) <= 80 for line in printed if line.startswith("|"))


def test_settings_that_are_refused_are_a_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_job(folder, OVERRIDES, "digits", lambda: run_of("trainer.batch_size=0"), Training()) == -math.inf
    outcome = outcome_in(folder)
    assert outcome.status == "failed" and str(outcome.reason).startswith("trainer.batch_size is 0")
    said = capsys.readouterr()
    assert said.out.startswith("\njob: ") and "error: trainer.batch_size is 0" in said.err


def test_no_secret_stands_in_the_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "not to be told")

    def check() -> RunConfig:
        raise ValueError("a library repeats not to be told")

    assert run_job(folder, OVERRIDES, "digits", check, Training()) == -math.inf
    assert outcome_in(folder).reason == "a library repeats <SOME_API_KEY>"


def test_the_name_of_a_file_that_is_not_utf8_stands_in_the_reason(folder: Path) -> None:
    def check() -> RunConfig:
        raise ValueError(os.fsdecode(b"caf\xe9 cannot be read"))

    assert run_job(folder, OVERRIDES, "digits", check, Training()) == -math.inf
    assert outcome_in(folder) == Outcome("failed", OVERRIDES, "digits", "caf\\udce9 cannot be read")
    summarize(folder.parent, read_jobs(folder.parent))


def test_the_table_shows_what_differs_in_the_order_of_its_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, status, reason in ((10, "done", None), (9, "done", None), (2, "failed", "no memory\nand more")):
        results = {"top1": seed / 100, "top5": 0.5, "evaluation": {"test": {"loss": 0.25}}, "seconds": 90.0}
        outcome = Outcome(status, [f"seed={seed}", "+experiment=some"], "digits", reason)
        write_job(tmp_path / f"seed={seed}", outcome, results)
    summarize(tmp_path, read_jobs(tmp_path))
    lines, cells = (tmp_path / SUMMARY_FILE).read_text().splitlines(), cells_in(tmp_path)
    assert cells[0] == ["seed", "top-1", "top-5", "loss", "minutes", "outcome", "folder"]
    assert cells[2:5] == [
        ["2", "", "", "", "", "failed: no memory", "seed=2"],
        ["9", "9.00%", "50.00%", "0.2500", "1.5", "done", "seed=9"],
        ["10", "10.00%", "50.00%", "0.2500", "1.5", "done", "seed=10"],
    ]
    figures = "top-1 9.50% ± 0.71%, top-5 50.00% ± 0.00%, loss 0.2500 ± 0.0000"
    assert lines[5:] == ["", f"{figures} (mean and deviation over 2 seeds)"]
    assert (
        describe_best(read_jobs(tmp_path)) == "the best trial is seed=10, with top-1 10.00%: seed=10 +experiment=some"
    )
    printed = capsys.readouterr().out
    assert all(line in printed for line in lines) and "2 done, 1 failed" in printed


def test_jobs_that_lack_the_same_data_share_a_row(tmp_path: Path) -> None:
    for data in ("cifar10", "food101"):
        for seed in (0, 1):
            outcome = Outcome("not run", [f"seed={seed}", f"data={data}"], data, "data missing")
            write_job(tmp_path / f"{data},{seed}", outcome)
    summarize(tmp_path, read_jobs(tmp_path))
    assert cells_in(tmp_path)[2:] == [
        ["", data, "not run: data missing (2 runs)", ""] for data in ("cifar10", "food101")
    ]


def test_a_table_over_experiments_names_the_ones_that_ran(tmp_path: Path) -> None:
    for name in ("half", "other_half"):
        words = [f"experiment={name}", "+experiment=whole"]
        write_job(tmp_path / name, Outcome("failed", words, "some", "no memory"))
    summarize(tmp_path, read_jobs(tmp_path))
    assert [row[0] for row in cells_in(tmp_path)[2:]] == ["half", "other_half"]


def test_a_value_in_brackets_stands_in_the_table(tmp_path: Path) -> None:
    for language in ("sw", "tn"):
        write_job(tmp_path / language, Outcome("failed", [f"data.languages=[{language}]"], "some", "no memory"))
    summarize(tmp_path, read_jobs(tmp_path))
    assert re.findall(r"\[\w+\]", (tmp_path / SUMMARY_FILE).read_text()) == ["[sw]", "[tn]"]


def test_a_long_reason_stands_in_one_row(tmp_path: Path) -> None:
    reason = " ".join(["a long sentence"] * 40)
    for seed in (0, 1):
        write_job(tmp_path / f"seed={seed}", Outcome("failed", [f"seed={seed}"], "some", reason))
    summarize(tmp_path, read_jobs(tmp_path))
    assert [row[1] for row in cells_in(tmp_path)[2:]] == [f"failed: {reason}"] * 2


def test_seeds_are_averaged_where_all_other_settings_are_the_same(tmp_path: Path) -> None:
    for seed, start in enumerate(("a", "b", "b")):
        config = {"seed": seed, "init_from": start, "tracking": {"mode": f"mode {seed}"}}
        outcome = Outcome("done", [f"seed={seed}"], "digits")
        write_job(tmp_path / f"seed={seed}", outcome, {"top1": seed / 10}, config)
    summarize(tmp_path, read_jobs(tmp_path))
    means = (tmp_path / SUMMARY_FILE).read_text().splitlines()[5:]
    assert means == ["", "top-1 15.00% ± 7.07% (mean and deviation over 2 seeds)"]


def test_a_setting_that_follows_from_the_seed_is_averaged_over_too(tmp_path: Path) -> None:
    for seed in (0, 1):
        config = {"seed": seed, "init_from": f"runs/p{seed}", "pipeline": {"memory_limit_bytes": seed}}
        outcome = Outcome("done", [f"seed={seed}", "init_from=runs/p${seed}"], "digits")
        write_job(tmp_path / f"seed={seed}", outcome, {"top1": seed / 10}, config)
    summarize(tmp_path, read_jobs(tmp_path))
    assert "top-1 5.00% ± 7.07% (mean and deviation over 2 seeds)" in (tmp_path / SUMMARY_FILE).read_text()


def test_a_table_has_the_jobs_of_its_sweep_also_those_done_before_and_names_others_in_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hydra = {"runtime": {"cwd": str(tmp_path)}, "sweep": {"dir": str(tmp_path), "subdir": "${hydra.job.num}"}}
    config = OmegaConf.create({"reproduction": None, "hydra": hydra})
    for seeds in ((0, 1, 2), (0, 1)):  # then the experiment's file is edited
        (end := SweepEnd()).on_multirun_start(config)
        for seed in seeds:
            (folder := tmp_path / f"seed={seed}").mkdir(exist_ok=True)
            words = ["data=digits", f"seed={seed}"]
            run_job(folder, words, "digits", lambda: run_of(f"seed={seed}"), Training(top1=seed / 10))  # noqa: B023
        end.on_multirun_end(config)
        table = (tmp_path / SUMMARY_FILE).read_text()
        assert [line.split("|")[1].strip() for line in table.splitlines()[2 : 2 + len(seeds)]] == list(map(str, seeds))
        assert f"(mean and deviation over {len(seeds)} seeds)" in table
        for path in tmp_path.glob(f"*/{OUTCOME_FILE}"):
            os.utime(path, (0, 0))  # long ago
    assert table.splitlines()[-1] == "left out, because this sweep did not run them: seed=2"
    assert capsys.readouterr().out.count("done before: ") == 2


def test_a_sweep_without_jobs_has_an_empty_table(tmp_path: Path) -> None:
    jobs: list[SweepJob] = read_jobs(tmp_path)
    summarize(tmp_path, jobs)
    assert "outcome" in (tmp_path / SUMMARY_FILE).read_text()


def test_a_reproduction_that_is_not_here_is_refused_before_the_first_job(tmp_path: Path) -> None:
    hydra = {
        "runtime": {"cwd": str(tmp_path), "choices": {}},
        "sweep": {"dir": str(tmp_path / "sweep"), "subdir": "${a}"},
    }
    config = OmegaConf.create({"reproduction": "claim", "hydra": hydra})
    with pytest.raises(SystemExit, match=r"reproduction is claim, but .* has no claims: start train.py in its repo"):
        SweepEnd().on_multirun_start(config)
    SweepEnd().on_run_start(config)  # which has no use for it
    SweepEnd().on_multirun_start(OmegaConf.merge(config, {"reproduction": None}))
    (tmp_path / "reproductions" / "claim").mkdir(parents=True)
    (tmp_path / "reproductions" / "claim" / "runs.jsonl").touch()
    SweepEnd().on_multirun_start(config)
    for start in (SweepEnd().on_multirun_start, SweepEnd().on_run_start):
        with pytest.raises(SystemExit, match=r"reproduction is claims, expected null, or one of claim: correct it\.$"):
            start(OmegaConf.merge(config, {"reproduction": "claims"}))


def test_a_cluster_that_is_not_here_is_refused_before_the_first_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    config = compose("train", overrides=["hydra/launcher=slurm"], return_hydra_config=True)
    with pytest.raises(
        SystemExit, match=r"this machine has no srun: start train.py on a login node of the cluster, or"
    ):
        SweepEnd().on_multirun_start(config)


def test_a_search_that_evaluates_nothing_is_refused_before_the_first_job() -> None:
    words = ["+search=learning_rate", "trainer.evaluation.every_epochs=null"]
    with pytest.raises(SystemExit, match=r"every_epochs and every_steps are null, but a search compares .*: set one"):
        SweepEnd().on_multirun_start(compose("train", overrides=words, return_hydra_config=True))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hydra/sweeper=optuna"], r"direction is minimize, expected maximize, because .*: set hydra.sweeper.direc"),
        (["+search=learning_rate", "hydra.sweeper.storage=sqlite:///a"], r"storage is set, expected null, because"),
    ],
)
def test_another_search_is_refused_before_the_first_job(words: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        SweepEnd().on_multirun_start(compose("train", overrides=words, return_hydra_config=True))


@pytest.mark.parametrize("subdir", ["/elsewhere/${hydra.job.num}", "a/${hydra.job.num}", "all"])
def test_jobs_outside_the_folder_of_their_sweep_or_in_one_folder_are_refused(subdir: str) -> None:
    composed = compose("train", overrides=[f"hydra.sweep.subdir='{subdir}'"], return_hydra_config=True)
    with pytest.raises(SystemExit, match=r"subdir is .*, expected a name without slashes that differs by job: leave"):
        SweepEnd().on_multirun_start(composed)


def test_to_work_in_the_folder_of_a_run_is_refused() -> None:
    composed = compose("train", overrides=["hydra.job.chdir=true"], return_hydra_config=True)
    for begin in (SweepEnd().on_run_start, SweepEnd().on_multirun_start):
        with pytest.raises(SystemExit, match=r"hydra.job.chdir is true, expected false, because .*: leave it out\.$"):
            begin(composed)


def test_a_damaged_record_of_a_job_is_named(tmp_path: Path) -> None:
    path = tmp_path / "03_seed1" / RECORD_FILE
    path.parent.mkdir()
    write_outcome(path.parent, Outcome("done", ["seed=1"], "digits"))
    path.write_text('{"kind": "meas')
    with pytest.raises(ValueError, match="is not the record of a job") as error:
        read_jobs(tmp_path)
    fault = "Unterminated string starting at: line 1 column 10 (char 9)"
    assert str(error.value) == f"{path} is not the record of a job ({fault}): delete it, and start the sweep again."


def test_a_launcher_without_a_sweep_is_refused() -> None:
    SweepEnd().on_run_start(compose("train", return_hydra_config=True))
    config = compose("train", overrides=["hydra/launcher=submitit_local"], return_hydra_config=True)
    with pytest.raises(
        SystemExit, match=r"hydra/launcher=submitit_local starts the jobs of a sweep, .*: add -m, which"
    ):
        SweepEnd().on_run_start(config)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("", "the file: Invalid JSON: EOF while parsing a value at line 1 column 0"),
        ('{"status": "done"}', "overrides: Field required"),
        ('{"status": "lost", "overrides": [], "data": "x"}', "status: Input should be 'done', 'failed' or 'not run'"),
        ('{"status": "done", "overrides": "a", "data": "x"}', "overrides: Input should be a valid array"),
    ],
)
def test_a_damaged_outcome_is_named(tmp_path: Path, damage: str, said: str) -> None:
    path = tmp_path / "03_seed1" / OUTCOME_FILE
    path.parent.mkdir()
    path.write_text(damage)
    with pytest.raises(ValueError, match="is not the outcome of a job") as error:
        read_jobs(tmp_path)
    expected = f"{path} is not the outcome of a job ({said}): delete it, and start the sweep again."
    assert str(error.value) == expected
