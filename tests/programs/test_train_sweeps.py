"""Sweeps and searches as a user starts them: what is done is skipped, what fails is told, and a table ends them."""

from pathlib import Path

import pytest

from gpipe.records import read_records
from tests.support.train_program import TINY, start

JOB = tuple(word for word in TINY if "num_microbatches" not in word)  # which sweeps go over


def test_a_sweep_skips_what_is_done_and_ends_with_its_table(tmp_path: Path) -> None:
    arguments = ("-m", *JOB, "pipeline.num_microbatches=1,2", "data=fashion_mnist_embedded,cifar10")
    done = start(tmp_path, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\njob: ") == 2
    assert "2 done, 2 not run; the table is in runs/sweep-" in done.stdout
    records = read_records(tmp_path / "runs")
    assert sorted(record.config["pipeline"]["num_microbatches"] for record in records) == [1, 2]
    (summary,) = (tmp_path / "runs").glob("sweep-*/summary.md")
    table = summary.read_text()
    assert table in done.stdout and table.count("not run: data missing (2 runs)") == 1

    next(summary.parent.glob("*/record.json")).unlink()  # as if it had been interrupted before its end
    again = start(tmp_path, *reversed(arguments))
    assert again.returncode == 0
    assert (again.stdout.count("\njob: "), again.stdout.count("\ndone before: ")) == (1, 1)
    assert "2 done, 2 not run" in again.stdout


def test_a_sweep_may_go_over_experiments(tmp_path: Path) -> None:
    experiments = "+experiment=amoebanet_imagenet,amoebanet_fashion_mnist"
    small = "model.num_layers=3", "model.num_filters=8", "data.image_size=32"
    done = start(tmp_path, "-m", experiments, *small, "trainer.dry_run=true")
    assert (done.returncode, done.stderr) == (0, "")
    assert "amoebanet_imagenet: K=4" in done.stdout and "amoebanet_fashion_mnist: K=1" in done.stdout
    (summary,) = (tmp_path / "runs").glob("sweep-*/summary.md")
    assert "2 done" in done.stdout and summary.read_text().count("| done") == 2


def test_a_job_that_fails_does_not_end_the_sweep_but_its_status_says_so(tmp_path: Path) -> None:
    done = start(tmp_path, "-m", *TINY, "pipeline.num_stages=10,1")
    assert done.returncode == 1
    assert "error: pipeline.num_stages is 10, but the model has 9 layers: set it to 9 or less." in done.stderr
    assert "1 done, 1 failed" in done.stdout
    assert len(read_records(tmp_path / "runs")) == 1


@pytest.mark.reliability
def test_the_jobs_of_a_sweep_may_run_in_processes_of_a_cluster(tmp_path: Path) -> None:
    """A job that starts processes of its own is tests/reliability/test_stops.py's."""
    done = start(tmp_path, "-m", *JOB, "hydra/launcher=submitit_local", "pipeline.num_microbatches=1,2")
    assert done.returncode == 0, done.stderr
    assert "2 done; the table is in" in done.stdout
    (sweep,) = (tmp_path / "runs").iterdir()
    assert len(list(sweep.glob("*/record.json"))) == 2


def test_a_search_tries_values_and_tells_the_best(tmp_path: Path) -> None:
    done = start(
        tmp_path,
        "-m",
        *JOB,
        "+search=learning_rate",
        "hydra.sweeper.n_trials=2",
        "pipeline.num_microbatches=2",
        warnings="default",
    )
    assert done.returncode == 0, done.stderr
    rates = {record.config["optimizer"]["learning_rate"] for record in read_records(tmp_path / "runs")}
    assert len(rates) == 2 and all(0.0003 <= rate <= 0.3 for rate in rates)
    (results,) = (tmp_path / "runs").rglob("optimization_results.yaml")
    assert "best_value: " in results.read_text()


def test_a_search_whose_trials_all_fail_ends_with_its_table(tmp_path: Path) -> None:
    search = "+search=learning_rate", "hydra.sweeper.n_trials=2", "pipeline.num_stages=10"
    done = start(tmp_path, "-m", *JOB, *search, warnings="default")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stdout.count("| failed: pipeline.num_stages is 10, but the model has 9 layers") == 2
    assert "\n2 failed; the table is in runs/sweep-" in done.stdout and "the best trial" not in done.stdout
