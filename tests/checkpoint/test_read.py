"""Checkpoints: what one partitioning wrote another reads, and every damage is noticed."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.folder import find_latest
from gpipe.checkpoint.manifest import MANIFEST, Manifest, Position, seal
from tests.training.small_run import NUM_LAYERS, SmallRun, small_run

POSITION = Position(step=3, epoch=0, batch=3, seed=0)
PARTITIONS = [(6,), (2, 4), (1, 2, 3), (1, 1, 1, 1, 1, 1)]


def assert_equal(run: SmallRun, expected: dict[str, torch.Tensor]) -> None:
    """Compare bit by bit, name by name."""
    found = run.tensors()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


@pytest.fixture
def trained() -> SmallRun:
    """A run of three stages after three steps."""
    run = small_run((1, 2, 3))
    run.train(3)
    return run


@pytest.fixture
def checkpoint(trained: SmallRun, tmp_path: Path) -> Path:
    """Its checkpoint."""
    return trained.save(tmp_path / "checkpoints", POSITION, config={"seed": 0}, results={"best_top1": 0.5})


@pytest.mark.parametrize("saving", PARTITIONS)
@pytest.mark.parametrize("loading", PARTITIONS)
def test_any_partitioning_reads_what_any_other_wrote(
    tmp_path: Path, saving: tuple[int, ...], loading: tuple[int, ...]
) -> None:
    first, second = small_run(saving), small_run(loading, seed=1)
    first.train(2)
    manifest = second.load(first.save(tmp_path, POSITION))
    assert_equal(second, first.tensors())
    assert manifest.position == POSITION


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor"])
def test_every_optimizer_continues_bitwise(tmp_path: Path, optimizer: str) -> None:
    first, second = small_run((2, 4), optimizer=optimizer), small_run((6,), optimizer=optimizer)
    first.train(2)
    second.train(1)
    second.load(first.save(tmp_path, POSITION))
    second.pipeline.step = first.pipeline.step
    first.train(2)
    second.train(2)
    assert_equal(second, first.tensors())


def test_names_follow_the_layer_and_each_stage_has_its_files(checkpoint: Path, trained: SmallRun) -> None:
    # Stage 1 has a layer with dropout and one that flattens: no tensors, no files.
    expected = {f"{kind}-{stage}.safetensors" for kind in ("weights", "ema", "optimizer") for stage in (0, 2)}
    assert {path.name for path in checkpoint.iterdir()} == expected | {MANIFEST}
    assert set(load_file(checkpoint / "weights-0.safetensors")) == {
        name for name in trained.pipeline.layers.state_dict(prefix="layers.") if name.startswith("layers.0.")
    }
    slots = {name.rsplit("/", 1)[1] for name in load_file(checkpoint / "optimizer-2.safetensors")}
    assert slots >= {"square_avg", "momentum_buffer"}


def test_the_manifest_lists_every_file_and_tensor(checkpoint: Path) -> None:
    manifest = Manifest.read(checkpoint)
    assert manifest.config == {"seed": 0} and manifest.results == {"best_top1": 0.5}
    assert manifest.num_layers == NUM_LAYERS and manifest.optimizer == "RMSpropTF"
    for name, entry in manifest.files.items():
        assert described(checkpoint / name) == asdict(entry)
    for entries in manifest.tensors.values():
        for name, tensor_entry in entries.items():
            tensor = load_file(checkpoint / tensor_entry.file)[name]
            assert tuple(tensor.shape) == tensor_entry.shape
            assert str(tensor.dtype) == f"torch.{tensor_entry.dtype}"


def test_a_stage_opens_only_the_files_of_its_layers(
    checkpoint: Path, trained: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    monkeypatch.setattr(Manifest, "check_file", lambda manifest, folder, name: checked.append(name))
    for index in (1, 2, 3, 4, 5):
        del trained.pipeline.layers[str(index)]
    trained.load_weights_alone(checkpoint)
    assert checked == ["weights-0.safetensors"]


def test_weights_alone_can_be_loaded(checkpoint: Path, trained: SmallRun) -> None:
    other = small_run((6,), seed=1, optimizer="sgd")
    other.load_weights_alone(checkpoint)
    for name, tensor in other.pipeline.layers.state_dict().items():
        assert torch.equal(tensor, trained.pipeline.layers.state_dict()[name])


def described(path: Path) -> dict[str, Any]:
    """Measure a file as the manifest does."""
    content = path.read_bytes()
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def without_averages(manifest: dict[str, Any]) -> None:
    """Forget the averages and their files."""
    for entry in manifest["tensors"].pop("ema").values():
        manifest["files"].pop(entry["file"], None)


def flip_a_bit(path: Path) -> None:
    """Damage the last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    """Lose the last byte."""
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    """Lose everything but the name."""
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip_a_bit, cut_short, empty, Path.unlink])
@pytest.mark.parametrize("kind", ["weights", "ema", "optimizer"])
def test_damage_is_noticed_and_nothing_is_loaded(checkpoint: Path, kind: str, damage: Callable[[Path], None]) -> None:
    run = small_run((2, 4), seed=1)
    before = run.tensors()
    path = checkpoint / f"{kind}-2.safetensors"
    damage(path)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))} .*choose another"):
        run.load(checkpoint)
    assert_equal(run, before)


@pytest.mark.parametrize("damage", [cut_short, empty, Path.unlink])
def test_a_damaged_manifest_is_noticed(checkpoint: Path, damage: Callable[[Path], None]) -> None:
    damage(checkpoint / MANIFEST)
    with pytest.raises(CheckpointError, match="choose another"):
        small_run().load(checkpoint)


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit the manifest's JSON."""
    content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    change(content)
    (folder / MANIFEST).write_text(json.dumps(seal(content)), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda m: m.update(format_version=9), "format version 9, but this program reads 2"),
        (lambda m: m.update(num_layers=7), "a model with 7 layers, but this one has 6"),
        (lambda m: m.update(optimizer="SGD"), "the state of SGD, but this run uses RMSpropTF"),
        (lambda m: m.update(num_layers=-1), "num_layers is -1"),
        (lambda m: m.update(num_layers=True), "num_layers is True"),
        (lambda m: m["position"].update(step="3"), "step is '3'"),
        (lambda m: m["position"].pop("seed"), "seed"),
        (lambda m: m.pop("files"), "files"),
        (lambda m: m["files"].update({"../secret.safetensors": m["files"]["weights-0.safetensors"]}), "file name"),
        (lambda m: m["tensors"]["weights"]["layers.3.bias"].update(file="weights-9.safetensors"), "not listed"),
        (lambda m: m["tensors"]["weights"]["layers.3.bias"].update(shape=[-1]), "shape is -1"),
        (lambda m: m["tensors"]["weights"].update(head=m["tensors"]["weights"]["layers.3.bias"]), "'head' is not of"),
        (
            lambda m: m["tensors"]["weights"]["layers.3.bias"].update(shape=[9]),
            r"layer 3 differs .*float32\[9\] there, float32\[8\] here",
        ),
        (lambda m: m["tensors"]["weights"]["layers.3.bias"].update(dtype="float64"), r"float64\[8\] there"),
        (
            lambda m: m["tensors"]["optimizer"]["layers.3.bias/square_avg"].update(shape=[9]),
            r"\[9\], but .* \[8\]",
        ),
        (without_averages, "no moving averages, but this run keeps them: set ema.decay=null"),
        (
            lambda m: m["tensors"]["weights"].pop("layers.3.bias"),
            r"layer 3 differs \(layers\.3\.bias is not there, float32\[8\] here\): build the model",
        ),
        (
            lambda m: m["tensors"]["weights"].update({"layers.3.scale": m["tensors"]["weights"]["layers.3.bias"]}),
            r"in its weights: layer 3 differs \(layers\.3\.scale is float32\[8\] there, not here\)",
        ),
        (
            lambda m: m["tensors"]["optimizer"].update(
                {"layers.3.scale/square_avg": m["tensors"]["optimizer"]["layers.3.bias/square_avg"]}
            ),
            "has optimiser state layers.3.scale/square_avg, which this run does not train",
        ),
    ],
)
def test_a_wrong_manifest_is_refused_in_a_sentence(
    checkpoint: Path, change: Callable[[dict[str, Any]], None], fault: str
) -> None:
    change_manifest(checkpoint, change)
    run = small_run((2, 4), seed=1)
    before = run.tensors()
    with pytest.raises(CheckpointError, match=fault) as raised:
        run.load(checkpoint)
    assert "\n" not in str(raised.value)
    assert_equal(run, before)


def test_a_file_that_disagrees_with_its_manifest_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "weights-2.safetensors"
    tensors = load_file(path)
    tensors["layers.3.bias"] = tensors["layers.3.bias"].double()
    save_file(tensors, path)
    change_manifest(checkpoint, lambda m: m["files"].update({path.name: described(path)}))
    with pytest.raises(CheckpointError, match=r"disagrees with its manifest \(layers\.3\.bias is not float32\[8\]"):
        small_run().load(checkpoint)


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


def test_a_save_that_was_cut_off_is_never_taken_for_a_checkpoint(
    tmp_path: Path, trained: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trained.save(tmp_path, POSITION)
    with monkeypatch.context() as patch:
        patch.setattr("gpipe.checkpoint.saver.write_manifest", lambda *arguments: 1 / 0)
        with pytest.raises(CheckpointError, match=r"cannot be written or read \(ZeroDivisionError"):
            trained.save(tmp_path, replace(POSITION, step=4))
    assert find_latest(tmp_path) == first
    second = trained.save(tmp_path, replace(POSITION, step=4))
    assert find_latest(tmp_path) == second
    small_run(seed=1).load(second)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, trained: SmallRun) -> None:
    (tmp_path / "checkpoints").write_text("a file in its place", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"cannot be written or read .*checkpoints.*check the disk"):
        trained.save(tmp_path / "checkpoints", POSITION)


def test_there_is_no_latest_before_the_first_save(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "checkpoints") is None
    (tmp_path / "latest").write_text("../elsewhere\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"says '\.\./elsewhere', which names no checkpoint"):
        find_latest(tmp_path)


def test_tied_weights_can_be_saved(tmp_path: Path) -> None:
    first, second = small_run(), small_run(seed=1)
    for run in (first, second):
        run.pipeline.layers["5"].tied = run.pipeline.layers["5"].weight
    second.load_weights_alone(first.save(tmp_path, POSITION))
    assert torch.equal(second.pipeline.layers["5"].weight, first.pipeline.layers["5"].weight)
    assert second.pipeline.layers["5"].tied is second.pipeline.layers["5"].weight


def test_nothing_is_kept_is_refused(tmp_path: Path, trained: SmallRun) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        trained.save(tmp_path, POSITION, keep=0)
