"""The program on tokens: a small Transformer from end to end, gone on from its checkpoint, and what is refused."""

import re
from pathlib import Path

import pytest
import torch
from hydra import compose

from gpipe.config import to_run
from gpipe.programs.train import launch_training
from gpipe.records import read_records
from tests.support.train_program import metrics, run_folder, start, weights

TOKENS = ("model=transformer_lm_small", "data=random_tokens")
TINY = (
    *TOKENS,
    "model.num_layers=3",
    "model.model_size=16",
    "model.feedforward_size=24",
    "model.dropout=0.2",
    "data.vocabulary_size=60",
    "data.sequence_length=12",
    "data.num_train=48",
    "trainer.batch_size=16",
    "trainer.timeline_every_steps=2",
    "schedule.name=constant",
    "schedule.warm_up_epochs=0",
    "launch.num_threads=1",
    "launch.device=cpu",
    "tracking=disabled",
)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    done = start(folder, *TINY, "trainer.max_steps=3", "launch=process_per_stage")
    assert (done.returncode, done.stderr) == (0, "")
    words = done.stdout.rpartition("\n\n")[2]
    figures = r"top-1 [\d.]+%, top-5 [\d.]+%, loss [\d.]+ \(top-1 [\d.]+% without averaging the weights\)"
    assert re.match(rf"train: {figures} on the test sequences after 3 steps in ", words)
    assert "sequences/s" in done.stdout and "images" not in done.stdout.partition("Try next")[0]
    return folder


def test_a_run_in_two_processes_leaves_a_record_with_its_speed(two_processes: Path) -> None:
    (record,) = read_records(run_folder(two_processes))
    results = record.results
    assert (results["examples"], results["num_timed_steps"]) == ("sequences", 2)
    assert results["tokens_per_second"] == pytest.approx(12 * results["examples_per_second"])
    assert results["step_seconds"] > 0 and results["peak_memory_bytes"] > 0
    assert 0 < results["equal_stages_bubble"] < 1 / 9 and 0 < results["bubble"] < 1
    assert results["equal_stages_bubble"] <= results["simulated_bubble"] < 1
    assert sum(results["partitions"]) == 5
    assert 3 < results["evaluation"]["test"]["loss"] < 5.5  # log(60) = 4.1


@pytest.mark.usefixtures("composer")
def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_never_stopped(two_processes: Path, tmp_path: Path) -> None:
    """One process goes on where two stopped, across the end of an epoch of three steps."""
    for name, more in (("whole", []), ("rest", [f"trainer.resume_from={run_folder(two_processes)}"])):
        folder = tmp_path / name / "runs" / "train" / "now"
        folder.mkdir(parents=True)
        launch_training(to_run(compose("train", overrides=[*TINY, "trainer.max_steps=5", *more])), folder, [])
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    assert [line["step"] for line in metrics(rest)] == [1, 2, 3, 3, 4, 5, 5]
    assert metrics(rest) == metrics(two_processes) + metrics(whole)[-3:]
    expected, found = weights(run_folder(whole)), weights(run_folder(rest))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_transformer_on_images_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    done = start(tmp_path, "model=transformer_lm_small")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: data.name is fashion_mnist_embedded, but model.family is transformer_lm, which expects tokens, such as "
        "data=text_folder: choose one for the other.\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_throughput_table_tells_speeds_and_which_cells_this_machine_cannot_run(tmp_path: Path) -> None:
    tiny = [item for item in TINY if item.startswith(("model.", "data.")) and item not in TOKENS]
    cells = ["experiment=table2_transformer_lm_laptop", "pipeline.num_stages=2,4096", "pipeline.num_microbatches=4"]
    experiment = ["+experiment=table2_throughput_laptop", "trainer.max_steps=3", "tracking=disabled"]
    done = start(tmp_path, "-m", *experiment, *tiny, *cells)
    assert (done.returncode, done.stderr) == (0, "")
    assert "table2_throughput_laptop: not evaluated after 3 steps" in done.stdout
    assert re.search(r"not run: needs 4096 cores, \d+ are here", done.stdout)
    header = "examples/s | s per step, data apart | bubble | bubble, equal stages | MiB, peak | minutes | outcome"
    assert header in done.stdout.replace("  ", "").replace(" |", " |")
    records = read_records(tmp_path / "runs")
    assert [record.config["trainer"]["batch_size"] for record in records] == [16]
    assert (records[0].results["top1"], records[0].results["num_timed_steps"]) == (None, 1)
    assert not list(tmp_path.rglob("checkpoints"))
