"""The program as a user starts it: small trainings from end to end, the same in every way to start them."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from gpipe.records import read_records
from tests.support.train_program import TINY, metrics, run_folder, start, train_here, weights


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, start(folder, *TINY, "trainer.timeline_every_steps=2", "launch=process_per_stage")


def test_a_run_in_two_processes_leaves_its_files(
    two_processes: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = two_processes
    assert (done.returncode, done.stderr) == (0, "")
    files = {
        "checkpoints",
        "classes.txt",
        "config.yaml",
        "metrics.jsonl",
        "record.json",
        "timeline.json",
        "timeline.png",
    }
    assert {path.name for path in run_folder(folder).iterdir()} == files
    (record,) = read_records(run_folder(folder))
    assert (record.kind, record.experiment, record.config["pipeline"]["num_stages"]) == ("measured", "train", 2)
    assert record.results["top1"] == metrics(folder)[-1]["test/top1"]
    assert json.loads((run_folder(folder) / "timeline.json").read_text())["traceEvents"]


def test_a_run_says_the_plan_first_and_then_what_it_did_and_what_to_try(
    two_processes: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = two_processes
    assert done.stdout.startswith("train: K=2 stages, M=4 micro-batches of 4")
    plan, _, words = done.stdout.rpartition("\n\n")
    assert re.search(r"s; bubble [\d.]+% \([\d.]+% if all stages were equal\), the slowest stage", plan)
    figures = r"top-1 [\d.]+%, top-5 [\d.]+%, loss [\d.]+ \(top-1 [\d.]+% without averaging the weights\)"
    assert re.match(rf"train: {figures} on the test images after 3 steps in \d+ s, ", words)
    assert "% of it waiting for data" in words
    assert re.search(
        r"\nPlanned bubble [\d.]+% \([\d.]+% if all stages were equal\); [\d.]+% simulated from the", words
    )
    assert str(run_folder(folder).relative_to(folder)) in words
    assert words.count("python train.py") == 3


def assert_same_results(folder: Path, other: Path) -> None:
    """Two runs logged the same numbers, and trained the same weights and averages to the last bit."""
    assert metrics(folder) == metrics(other)
    found, expected = (weights(run_folder(one)) for one in (folder, other))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_torchrun_trains_the_same_to_the_last_bit(
    two_processes: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Also the two runs of two processes each with one seed equal each other."""
    assert start(tmp_path, *TINY, torchrun=True).returncode == 0
    assert_same_results(tmp_path, two_processes[0])


@pytest.mark.usefixtures("composer")
def test_one_process_trains_the_same_to_the_last_bit(
    two_processes: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    train_here(tmp_path, *TINY)
    assert_same_results(tmp_path, two_processes[0])


def test_with_workers_and_one_stage_it_trains_the_same_to_the_last_bit(
    two_processes: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    # The warning that may be given: more workers than cores.
    done = start(tmp_path, *TINY, "data.num_workers=2", "pipeline.num_stages=1", warnings="default")
    assert done.returncode == 0, done.stderr
    assert_same_results(tmp_path, two_processes[0])


@pytest.mark.usefixtures("composer")
def test_mixed_images_train_the_same_in_two_processes(tmp_path: Path) -> None:
    """The process of the last stage draws without images."""
    mixed = ["data.mixup=0.8", "data.cutmix=1", "data.random_erasing=0.5", "trainer.label_smoothing=0.1"]
    short = ["trainer.max_steps=2", "trainer.evaluation.every_epochs=null", "model.num_layers=3"]
    one, two = tmp_path / "one", tmp_path / "two"
    two.mkdir()
    done = start(two, *TINY, *mixed, *short, "launch=process_per_stage")
    assert (done.returncode, done.stderr) == (0, "")
    train_here(one, *TINY, *mixed, *short, "pipeline.num_stages=1")
    assert_same_results(one, two)


def test_the_first_hint_goes_on_from_the_runs_checkpoint(
    two_processes: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    folder, done = two_processes
    hint = next(line for line in done.stdout.splitlines() if "resume_from" in line)
    arguments = hint.partition("python train.py ")[2].split()
    assert "trainer.max_steps=6" in arguments
    arguments = [argument.replace("resume_from=", f"resume_from={folder}/") for argument in arguments]
    assert start(tmp_path, *arguments, "pipeline.num_stages=1").returncode == 0
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 3, 4, 5, 6, 6]


def test_help_is_for_newcomers(tmp_path: Path) -> None:
    done = start(tmp_path, "--help")
    assert done.returncode == 0
    assert "+experiment=amoebanet_imagenet_laptop" in done.stdout
    assert len(done.stdout.splitlines()) <= 40
    assert list(tmp_path.iterdir()) == []


def test_a_transfer_keeps_all_but_the_softmax_layer(
    two_processes: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """At a learning rate of almost nothing, what was trained before is what is there after."""
    checkpoint = run_folder(two_processes[0])
    still = [
        "optimizer.learning_rate=1e-30", "optimizer.weight_decay=0", "model.batch_norm_momentum=1e-30",
        "ema.decay=0.99999999", "ema.warm_up=false", "trainer.evaluation.statistics_batches=null", "seed=5",
    ]  # fmt: skip
    arguments = [*TINY, *still, "data=digits", "pipeline=interleaved", "launch=process_per_stage"]
    done = start(tmp_path, *arguments, f"init_from={checkpoint}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nProcess s mod 2 plays stage s.\n" in done.stdout  # two processes of two stages each
    before, after = (weights(folder) for folder in (checkpoint, run_folder(tmp_path)))
    softmax = {"layers.8.fully_connected.weight", "layers.8.fully_connected.bias"}
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        if name.partition("/")[2] not in softmax and not name.endswith("num_batches_tracked"):
            evaluated = before[f"ema/{name.partition('/')[2]}"]
            assert torch.allclose(tensor, evaluated, rtol=1e-5, atol=1e-7), name
    assert not torch.equal(
        after["weights/layers.8.fully_connected.weight"], before["weights/layers.8.fully_connected.weight"]
    )


@pytest.mark.usefixtures("composer")
def test_a_checkpoint_of_another_model_is_refused_with_its_layers_and_settings(
    two_processes: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [argument for argument in TINY if "num_filters" not in argument]
    with pytest.raises(SystemExit) as end:
        train_here(tmp_path, *arguments, f"init_from={run_folder(two_processes[0])}")
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert "does not fit this model in its ema: layers 1, 2, 3, 4, 5, 6, 7 differ (layers.1." in said
    assert "model.num_filters is 8 there, 16 here: build the model, with the settings" in said
