"""The program as a user starts it: small trainings from end to end, the plan, and the messages."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpipe.results.records import read_records
from tests.data.small_sets import write_oxford_pets

ROOT = Path(__file__).parents[1]
TRAIN = str(ROOT / "train.py")
TINY = (
    "trainer.max_steps=3",
    "trainer.batch_size=16",
    "trainer.evaluation_batch_size=500",
    "trainer.timeline_every_steps=2",
    "model.num_filters=8",
    "data.image_size=32",
    "schedule.warm_up_epochs=0",
    "launch.num_threads=1",
    "launch.device=cpu",
    "tracking=disabled",
)


def start(
    folder: Path, *arguments: str, torchrun: bool = False, warnings: str = "error"
) -> subprocess.CompletedProcess[str]:
    """Run train.py in a folder, with warnings as errors, and return what came of it."""
    program = [sys.executable, "-W", warnings, TRAIN]
    if torchrun:
        program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", TRAIN]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [*program, *arguments], check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )


def run_folder(folder: Path) -> Path:
    """Return the one run's folder."""
    (found,) = (folder / "runs").glob("*/*")
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights and averages of a run's last checkpoint, by kind and name."""
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    return {
        f"{kind}/{name}": tensor
        for kind in ("weights", "ema")
        for path in checkpoint.glob(f"{kind}-*.safetensors")
        for name, tensor in load_file(path).items()
    }


def metrics(folder: Path) -> list[dict[str, float]]:
    """Return the lines of a run's log that are of steps and evaluations, without what depends on the machine."""
    every = [json.loads(line) for line in (run_folder(folder) / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in every if "epoch" in line]
    timed = {"examples_per_second", "step_seconds", "peak_memory_bytes", "wait_seconds", "bubble"}
    return [{key: value for key, value in line.items() if key not in timed} for line in lines]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, start(folder, *TINY, "launch=process_per_stage")


def test_a_run_in_two_processes_leaves_its_files(
    two_processes: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = two_processes
    assert (done.returncode, done.stderr) == (0, "")
    files = {"checkpoints", "config.yaml", "metrics.jsonl", "record.json", "timeline.json", "timeline.png"}
    assert {path.name for path in run_folder(folder).iterdir()} == files
    (record,) = read_records(run_folder(folder))
    assert (record.kind, record.experiment, record.config["pipeline"]["num_stages"]) == ("measured", "train", 2)
    assert record.results["top1"] == metrics(folder)[-1]["test/top1"]
    assert json.loads((run_folder(folder) / "timeline.json").read_text())["traceEvents"]


def test_a_run_says_the_plan_first_and_then_what_it_did_and_what_to_try(
    two_processes: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = two_processes
    assert done.stdout.startswith("train: K=2 stages, M=8 micro-batches of 2")
    plan, _, words = done.stdout.rpartition("\n\n")
    assert "Predicted bubble (K-1)/(M+K-1) = 11.1%" in plan
    figures = r"top-1 [\d.]+%, top-5 [\d.]+%, loss [\d.]+"
    assert re.match(rf"train: {figures} on the test images after 3 steps in \d+ s, ", words)
    assert "% of them waiting for data" in words
    assert "Bubble of a step: 11.1% predicted, " in words
    assert str(run_folder(folder).relative_to(folder)) in words
    assert words.count("python train.py") == 3


def test_one_process_and_torchrun_train_the_same(
    two_processes: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    expected = metrics(two_processes[0])
    one, adopted = tmp_path / "one", tmp_path / "adopted"
    one.mkdir()
    adopted.mkdir()
    assert start(one, *TINY).returncode == 0
    assert metrics(one) == expected
    assert start(adopted, *TINY, torchrun=True).returncode == 0
    assert metrics(adopted) == expected


@pytest.mark.parametrize(
    "arguments",
    [["launch=process_per_stage"], ["data.num_workers=2", "pipeline.num_stages=1"], ["data.num_workers=4"]],
    ids=" ".join,
)
def test_the_same_seed_trains_the_same_weights_to_the_last_bit(
    two_processes: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, arguments: list[str]
) -> None:
    # torch warns of more workers than cores
    assert start(tmp_path, *TINY, *arguments, warnings="default").returncode == 0
    expected, found = (weights(run_folder(folder)) for folder in (two_processes[0], tmp_path))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_the_first_hint_goes_on_from_the_runs_checkpoint(
    two_processes: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    folder, done = two_processes
    hint = next(line for line in done.stdout.splitlines() if "resume_from" in line)
    arguments = hint.partition("python train.py ")[2].split()
    assert "trainer.max_steps=6" in arguments
    arguments = [argument.replace("resume_from=", f"resume_from={folder}/") for argument in arguments]
    assert start(tmp_path, *arguments, "pipeline.num_stages=1").returncode == 0
    assert [line["step"] for line in metrics(tmp_path)] == [4, 5, 6, 6]


def test_an_error_in_a_process_ends_the_run_with_one_message(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = start(tmp_path, *TINY, "launch=process_per_stage", "data.num_classes=9")
    assert time.monotonic() - begin < 60
    assert done.returncode == 1
    sentence = "error: data.num_classes is 9, but fashion_mnist_embedded has 10: set data.num_classes=10.\n"
    assert done.stderr.startswith(sentence)
    assert len(done.stderr.splitlines()) == 2
    assert "Traceback" in (run_folder(tmp_path) / "error.txt").read_text()


def test_missing_data_is_said_before_anything_is_built(tmp_path: Path) -> None:
    done = start(tmp_path, "+experiment=amoebanet_imagenet")
    assert (done.returncode, done.stdout) == (1, "")
    for said in ("imagenet is missing", "Looked for", "Expected tree", "How to get it", "fashion_mnist_embedded"):
        assert said in done.stderr
    assert done.stderr.count("error") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_set_of_other_numbers_than_the_papers_trains_with_a_warning_that_has_both(tmp_path: Path) -> None:
    write_oxford_pets(tmp_path / "sets")
    data = ("data=oxford_pets", f"data.root={tmp_path / 'sets'}", "data.num_classes=3", "data.num_workers=0")
    done = start(tmp_path, *TINY, *data, "trainer.batch_size=5", "pipeline.num_microbatches=1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("warning: ") == 3
    assert "warning: oxford_pets has 3 classes, but Table 4 of the paper says 37" in done.stdout
    assert "warning: oxford_pets has 5 training images, but Table 4 of the paper says 3,680" in done.stdout


def test_the_plan_of_the_full_size_model_needs_no_data_and_no_memory(tmp_path: Path) -> None:
    done = start(tmp_path, "+experiment=amoebanet_imagenet", "trainer.dry_run=true")
    assert (done.returncode, done.stderr) == (0, "")
    # 557,277,864 parameters (paper.md, section 2) and the auxiliary head.
    assert "559,063,693 parameters" in done.stdout
    assert "K=4 stages, M=32 micro-batches of 32" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("model.num_filter=3", "Could not override 'model.num_filter'"),
        ("+model.num_filter=3", "error: model.num_filter is unknown, expected one of auxiliary_head"),
        ("pipeline.num_stages=10", "error: num_partitions is 10, but 9 layers can make from 1 to 9"),
    ],
)
def test_wrong_input_is_one_message_and_status_1(tmp_path: Path, argument: str, said: str) -> None:
    done = start(tmp_path, *TINY, argument)
    assert done.returncode == 1
    assert done.stderr.startswith(said)
    assert "Traceback" not in done.stderr


def test_help_is_for_newcomers(tmp_path: Path) -> None:
    done = start(tmp_path, "--help")
    assert done.returncode == 0
    assert "+experiment=amoebanet_imagenet scale=laptop" in done.stdout
    assert len(done.stdout.splitlines()) <= 40
    assert list(tmp_path.iterdir()) == []


def test_a_transfer_keeps_all_but_the_softmax_layer(
    two_processes: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """At a learning rate of almost nothing, what was trained before is what is there after."""
    checkpoint = run_folder(two_processes[0])
    still = [
        "optimizer.learning_rate=1e-30", "optimizer.weight_decay=0", "model.batch_norm_momentum=1e-30",
        "ema.decay=0.99999999", "ema.warm_up=false", "seed=5",
    ]  # fmt: skip
    arguments = [*TINY, *still, "data=digits", "pipeline=interleaved", "launch=process_per_stage"]
    done = start(tmp_path, *arguments, f"init_from={checkpoint}")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"│ +(\d) │\n", done.stdout) == ["0", "1", "0", "1"]  # two processes of two stages each
    before, after = (weights(folder) for folder in (checkpoint, run_folder(tmp_path)))
    softmax = {"layers.8.fully_connected.weight", "layers.8.fully_connected.bias"}
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        if name.partition("/")[2] not in softmax and not name.endswith("num_batches_tracked"):
            assert torch.allclose(tensor, before[name], rtol=1e-5, atol=1e-7), name
    assert not torch.equal(
        after["weights/layers.8.fully_connected.weight"], before["weights/layers.8.fully_connected.weight"]
    )


def test_a_checkpoint_of_another_model_is_refused_with_its_layers_and_settings(
    two_processes: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    arguments = [argument for argument in TINY if "num_filters" not in argument]
    done = start(tmp_path, *arguments, f"init_from={run_folder(two_processes[0])}")
    assert done.returncode == 1
    assert "does not fit this model in its weights: layers 1, 2, 3, 4, 5, 6, 7 differ (layers.1." in done.stderr
    assert "model.num_filters is 8 there, 16 here: build the model, with the settings" in done.stderr


def test_a_checkpoint_that_is_not_there_is_said_before_anything_is_built(tmp_path: Path) -> None:
    done = start(tmp_path, *TINY, "init_from=nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr == "error: init_from is nowhere, which has no checkpoint: name a run's folder or a checkpoint's.\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_skips_what_is_done_and_ends_with_its_table(tmp_path: Path) -> None:
    arguments = ("-m", *TINY, "pipeline.num_microbatches=1,2", "data=fashion_mnist_embedded,cifar10")
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
    done = start(tmp_path, "-m", experiments, "trainer.dry_run=true")
    assert (done.returncode, done.stderr) == (0, "")
    assert "amoebanet_imagenet: K=4" in done.stdout and "amoebanet_fashion_mnist: K=1" in done.stdout
    (summary,) = (tmp_path / "runs").glob("sweep-*/summary.md")
    assert "2 done" in done.stdout and summary.read_text().count("| done") == 2


def test_a_job_that_fails_does_not_end_the_sweep_but_its_status_says_so(tmp_path: Path) -> None:
    done = start(tmp_path, "-m", *TINY, "pipeline.num_stages=10,1")
    assert done.returncode == 1
    assert "error: num_partitions is 10, but 9 layers can make from 1 to 9" in done.stderr
    assert "1 done, 1 failed" in done.stdout
    assert len(read_records(tmp_path / "runs")) == 1


def test_the_jobs_of_a_sweep_may_run_in_processes_of_a_cluster(tmp_path: Path) -> None:
    arguments = ("-m", *TINY, "hydra/launcher=submitit_local", "launch=process_per_stage", "seed=1,2")
    done = start(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert "2 done; the table is in" in done.stdout
    (sweep,) = (tmp_path / "runs").iterdir()
    assert len(list(sweep.glob("*/record.json"))) == 2


def test_a_search_tries_values_and_tells_the_best(tmp_path: Path) -> None:
    done = start(tmp_path, "-m", *TINY, "+search=learning_rate", "hydra.sweeper.n_trials=2", warnings="default")
    assert done.returncode == 0, done.stderr
    rates = {record.config["optimizer"]["learning_rate"] for record in read_records(tmp_path / "runs")}
    assert len(rates) == 2 and all(0.0003 <= rate <= 0.3 for rate in rates)
    (results,) = (tmp_path / "runs").rglob("optimization_results.yaml")
    assert "best_value: " in results.read_text()
