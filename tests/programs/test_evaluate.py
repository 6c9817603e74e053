"""A trained model is evaluated again by train.py evaluate=<run>."""

import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose
from PIL import Image

from gpipe.config import ConfigError, RunConfig, to_plain, to_run
from gpipe.config.evaluated import to_evaluated
from gpipe.launch import processes, stops
from gpipe.programs.complete import complete
from gpipe.programs.evaluate import _has_training_data, launch_evaluation
from gpipe.programs.workloads import workload_of
from tests.support.train_program import TINY, run_folder, start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which a run was trained."""
    folder = tmp_path_factory.mktemp("trained")
    done = start(folder, *TINY)
    assert done.returncode == 0, done.stderr
    return folder


def figures(printed: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r" ([a-z_0-9]+) ([\d.]+)", printed.splitlines()[-1])}


@pytest.mark.parametrize("launch", ["one_process", "process_per_stage"])
def test_the_figures_are_those_of_the_run_and_nothing_is_left_behind(folder: Path, launch: str) -> None:
    before = sorted(folder.rglob("*"))
    done = start(folder, "evaluate=runs/train", "pipeline.num_stages=2", f"launch={launch}", "launch.device=cpu")
    assert done.returncode == 0, done.stderr
    record = json.loads((run_folder(folder, "train") / "record.json").read_text())
    expected = record["results"]["evaluation"]["test"]
    assert figures(done.stdout) == pytest.approx(expected, abs=6e-5)
    assert "raw_top1" in expected and "after 3 steps, on fashion_mnist_embedded" in done.stdout
    assert sorted(folder.rglob("*")) == before


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_evaluation_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(stops, "_listener", None)
    monkeypatch.setattr(processes, "run", lambda *_: os.kill(os.getpid(), number))
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background ignores it
    stops.listen()  # as train.py does
    try:
        with pytest.raises(KeyboardInterrupt):
            launch_evaluation(compose("train", overrides=[f"evaluate={folder}/runs/train"]), tmp_path, [])
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_a_checkpoint_behind_the_last_evaluation_gets_the_statistics_of_its_weights(tmp_path: Path) -> None:
    for name, every in (("seldom", 3), ("often", 1)):
        words = (f"trainer.evaluation.every_steps={every}", "trainer.checkpoints.every_steps=1", "trainer.max_steps=3")
        done = start(tmp_path, *TINY, f"name={name}", *words, "trainer.checkpoints.keep=9")
        assert done.returncode == 0, done.stderr
    (seldom,), (often,) = ([*(tmp_path / "runs" / name).iterdir()] for name in ("seldom", "often"))
    rows = [json.loads(line) for line in (often / "metrics.jsonl").read_text().splitlines()]
    harmless = ("data.num_workers=1", "data.prefetch_factor=5")
    for step, words in ((2, harmless), (3, ())):
        done = start(tmp_path, f"evaluate={seldom}/checkpoints/step-{step:08}", "launch.device=cpu", *words)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        (row,) = (row for row in rows if row["step"] == step and "test/loss" in row)
        expected = {name.removeprefix("test/"): value for name, value in row.items() if name.startswith("test/")}
        for name, value in figures(done.stdout).items():
            assert value == pytest.approx(expected[name], abs=6e-5), (step, name)


def test_weights_that_were_trained_without_raw_figures_get_the_statistics_of_their_own(folder: Path) -> None:
    done = start(folder, *TINY, "name=quiet", "trainer.evaluation.raw=false")
    assert done.returncode == 0, done.stderr
    done = start(folder, "evaluate=runs/quiet", "trainer.evaluation.raw=true", "launch.device=cpu")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    record = json.loads((run_folder(folder, "train") / "record.json").read_text())  # of the run with raw figures
    assert figures(done.stdout) == pytest.approx(record["results"]["evaluation"]["test"], abs=6e-5)


def test_statistics_of_another_number_of_mini_batches_are_those_of_a_run_that_took_as_many(folder: Path) -> None:
    setting = "trainer.evaluation.statistics_batches=1"
    done = start(folder, *TINY, "name=hasty", setting)
    assert done.returncode == 0, done.stderr
    done = start(folder, "evaluate=runs/train", setting, "launch.device=cpu")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    hasty, usual = (
        json.loads((run_folder(folder, name) / "record.json").read_text())["results"]["evaluation"]["test"]
        for name in ("hasty", "train")
    )
    assert figures(done.stdout) == pytest.approx(hasty, abs=6e-5) != pytest.approx(usual, abs=6e-5)


def test_statistics_that_lag_are_told_where_they_are_not_to_be_estimated_or_the_images_are_others(
    tmp_path: Path,
) -> None:
    done = start(tmp_path, *TINY, "trainer.evaluation.every_epochs=null", "trainer.max_steps=1")
    assert done.returncode == 0, done.stderr
    said = r"^warning: \S+ was saved without an evaluation: its batch norms have moving averages"
    for word in ("trainer.evaluation.statistics_batches=null", "data.max_images=10"):
        done = start(tmp_path, "evaluate=runs/train", word, "launch.device=cpu")
        assert done.returncode == 0 and re.match(said, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["evaluate=nowhere"], "error: evaluate is nowhere, which has no checkpoint"),
        (["evaluate=runs/train", "model.num_filters=16"], "error: model.num_filters=16 is given with evaluate"),
        (["evaluate=runs/train", "data=food101", "data.root=."], "error: data.name is food101, which has 101 classes"),
        (
            ["evaluate=runs/train", "data.max_images=10", "trainer.evaluation.statistics_batches=1"],
            "error: trainer.evaluation.statistics_batches is 1, but statistics are estimated on the data of the ",
        ),
        (["-m", "evaluate=runs/train", "seed=0"], "error: evaluate is runs/train in a sweep, expected null"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_a_sentence(folder: Path, overrides: list[str], said: str) -> None:
    done = start(folder, *overrides)
    assert done.returncode == 1 and done.stderr.strip().startswith(said) and "\n" not in done.stderr.strip()


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ([], {}),
        (["data.num_workers=5"], {"data.num_workers": 5}),
        (["pipeline.num_microbatches=3"], {"pipeline.num_microbatches": 3}),
        (["trainer.evaluation.batch_size=7"], {"trainer.evaluation.batch_size": 7}),
        (["trainer.evaluation={batch_size:7}"], {"trainer.evaluation.batch_size": 7}),
        (["trainer={evaluation:{batch_size:7}}"], {"trainer.evaluation.batch_size": 7}),
        (["data={num_workers:5}"], {"data.num_workers": 5}),
        (["data=mnist_5k"], {"data.name": "mnist_5k"}),
        (["data=mnist_5k", "data.image_size=40"], {"data.name": "mnist_5k", "data.image_size": 40}),
        (["pipeline=interleaved"], {"pipeline.schedule": "interleaved_1f1b", "pipeline.stages_per_device": 2}),
        (["launch=process_per_stage", "pipeline.num_stages=3"], {"launch.num_processes": 3, "pipeline.num_stages": 3}),
    ],
    ids=str,
)
def test_the_command_line_changes_what_it_says_and_leaves_the_rest_as_it_was(
    overrides: list[str], changed: dict[str, Any]
) -> None:
    trained = ["model.num_filters=24", "data.image_size=48", "optimizer=sgd", "ema.decay=null", "seed=7"]
    saved = to_plain(to_run(compose("train", overrides=trained)))
    found = to_plain(to_evaluated(compose("train", overrides=["evaluate=x", *overrides]), saved, overrides))
    assert found["model"] == saved["model"] and found["seed"] == 7 and found["optimizer"] == saved["optimizer"]
    differing = {key for key, value in _flat(found).items() if _flat(saved)[key] != value}
    assert {key: _flat(found)[key] for key in changed} == changed
    same_section = {key.partition(".")[0] for key in changed}
    assert {key.partition(".")[0] for key in differing} <= same_section
    if "data.image_size" not in changed:
        assert found["data"]["image_size"] == 48


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize(
    "word", ["model=amoebanet_b", "seed=3", "+experiment=transfer_laptop", "ema.decay=0.5", "ema={decay:0.5}"]
)
def test_the_model_and_its_training_cannot_be_changed(word: str) -> None:
    saved = to_plain(to_run(compose("train")))
    with pytest.raises(ConfigError, match="is given with evaluate"):
        to_evaluated(compose("train"), saved, [word])


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize(
    ("data", "before", "held_out"),
    [
        (["data=fashion_mnist_embedded"], "data.validation_images=null", "data.validation_images=100"),
        (["data=image_folder", "data.root=own"], "data.validation_share=0.1", "data.validation_share=0.5"),
    ],
)
def test_examples_of_the_training_are_not_held_out_afterwards(data: list[str], before: str, held_out: str) -> None:
    saved = to_plain(to_run(compose("train", overrides=[*data, before, "data.num_classes=10"])))
    key, expected = before.split("=")
    said = f"{held_out.replace('=', ' is ')}, but {expected} in the training, which has seen "
    for words in ([held_out], [*data, held_out]):
        with pytest.raises(ConfigError, match=f"^{said}some of those examples: leave it out.$"):
            to_evaluated(compose("train", overrides=[*data, "data.num_classes=10", *words]), saved, words)
    for words in ([before], [f"{key}=null"], ["data=mnist_5k", "data.validation_images=100"]):
        to_evaluated(compose("train", overrides=[*data[:1], "data.num_classes=10", *words]), saved, words)


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize("several", [False, True])
def test_a_table_of_the_other_kind_is_refused(tmp_path: Path, several: bool) -> None:
    for column in ("label", "labels"):
        folder = tmp_path / column
        folder.mkdir()
        for split in ("train", "val"):
            (folder / f"{split}.csv").write_text(f"path,{column}\na.png,a\nb.png,b\n")
        for name in ("a", "b"):
            Image.new("L", (8, 8)).save(folder / f"{name}.png")
    own, other = (tmp_path / column for column in (("labels", "label") if several else ("label", "labels")))
    table = ["data=image_table", f"data.root={own}", "data.image_size=32", "data.num_workers=0"]
    saved = to_plain(complete(to_run(compose("train", overrides=table))))
    assert saved["data"]["several_labels"] is several

    def evaluate(*words: str) -> RunConfig:
        return to_evaluated(compose("train", overrides=["evaluate=x", *table[:1], *words]), saved, words)

    kinds = ("one label", "several labels")
    for words in ([], ["data=image_table"]):
        assert workload_of(evaluate(*words, f"data.root={own}")).warnings() == []
        sentence = f"data.root is {other}, whose images have {kinds[not several]} each, but the model predicts "
        with pytest.raises(ConfigError, match=f"^{sentence}{kinds[several]} each: choose a table of that kind.$"):
            workload_of(evaluate(*words, f"data.root={other}")).warnings()
    if several:
        composed = compose("train", overrides=["evaluate=x", "data=image_folder", "data.num_classes=2"])
        with pytest.raises(ConfigError, match=r"^data\.name is image_folder, whose images have one label each, but"):
            to_evaluated(composed, saved, ["data=image_folder"])


@pytest.mark.usefixtures("composer")
def test_the_data_of_a_training_by_an_older_program_are_its_own() -> None:
    saved = to_plain(to_run(compose("train")))
    older = {**saved, "data": {name: value for name, value in saved["data"].items() if name != "keep_aspect"}}
    for words, is_same in (["data.num_workers=5"], True), (["data.max_images=100"], False):
        run = to_evaluated(compose("train", overrides=["evaluate=x", *words]), older, words)
        assert _has_training_data(run, SimpleNamespace(config=older)) is is_same


def _flat(plain: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in plain.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
