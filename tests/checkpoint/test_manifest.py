"""The manifest lists everything, and a wrong one is refused in a sentence."""

import hashlib
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.manifest import MANIFEST, Manifest, seal
from tests.checkpoint.conftest import POSITION
from tests.training.small_run import NUM_LAYERS, assert_equal, small_run


def described(path: Path) -> dict[str, Any]:
    """Measure a file as the manifest does."""
    content = path.read_bytes()
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


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


@pytest.mark.parametrize("content", [b"", b"{", b'{"format_version": 2}'])
def test_a_damaged_manifest_is_noticed(checkpoint: Path, content: bytes) -> None:
    (checkpoint / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is not a valid manifest \(.*\): choose another"):
        small_run().load(checkpoint)


def test_a_missing_manifest_is_noticed(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"json is missing: the checkpoint is incomplete, choose another"):
        small_run().load(checkpoint)


def test_a_manifest_that_is_damaged_but_still_valid_is_noticed(checkpoint: Path) -> None:
    text = (checkpoint / MANIFEST).read_text().replace('"seed": 0', '"seed": 1')
    (checkpoint / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match="its content does not match its SHA-256"):
        Manifest.read(checkpoint)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(checkpoint: Path) -> None:
    renamed = checkpoint.rename(checkpoint.with_name("step-00000004"))
    with pytest.raises(CheckpointError, match=r"step-00000004 has the checkpoint of step 3: rename the folder back"):
        Manifest.read(renamed)


def test_equal_checkpoints_have_equal_manifests(tmp_path: Path) -> None:
    settings = {"seed": 0, "name": "small"}, {"name": "small", "seed": 0}
    paths = [
        small_run().save(tmp_path / str(number), POSITION, config=each) / MANIFEST
        for number, each in enumerate(settings)
    ]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def without_averages(manifest: dict[str, Any]) -> None:
    """Forget the averages and their files."""
    for entry in manifest["tensors"].pop("ema").values():
        manifest["files"].pop(entry["file"], None)


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
        (lambda m: m.update(position=[]), r"position is \[\], expected an object"),
        (lambda m: m.update(files=3), "files is 3, expected an object"),
        (lambda m: m.update(optimizer=3), "optimizer is 3, expected text"),
        (lambda m: m["tensors"]["weights"]["layers.3.bias"].update(shape=8), "shape is 8, expected a list"),
        (lambda m: m["position"].pop("seed"), "seed"),
        (lambda m: m.pop("files"), "files"),
        (lambda m: m["files"].update({"../secret.safetensors": m["files"]["weights-0.safetensors"]}), "file name"),
        (lambda m: m["tensors"]["weights"]["layers.3.bias"].update(file="weights-9.safetensors"), "not listed"),
        (lambda m: m["tensors"]["weights"]["layers.3.bias"].update(shape=[-1]), "shape is -1"),
        (lambda m: m["tensors"]["weights"].update(head=m["tensors"]["weights"]["layers.3.bias"]), "'head' is not of"),
        (
            lambda m: m["tensors"]["weights"].update({"layers.6.bias": m["tensors"]["weights"]["layers.3.bias"]}),
            r"layers\.6\.bias is of layer 6, but there are 6 layers",
        ),
        (
            lambda m: m["tensors"]["optimizer"].update({"layers.3.bias/a/b": m["tensors"]["weights"]["layers.3.bias"]}),
            r"'layers\.3\.bias/a/b' is not a name of optimizer",
        ),
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


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["position"].update({f"step{number}": 0 for number in range(20_000)}),
        lambda m: m["tensors"]["weights"].update({f"layers.{number}.weight": 0 for number in range(20_000)}),
    ],
)
def test_a_manifest_with_many_faults_takes_no_more_memory(
    checkpoint: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    change_manifest(checkpoint, change)
    tracemalloc.start()
    with pytest.raises(CheckpointError) as raised:
        Manifest.read(checkpoint)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(str(raised.value)) < 1000
    assert peak < 30 * (checkpoint / MANIFEST).stat().st_size


def test_a_file_that_disagrees_with_its_manifest_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "weights-2.safetensors"
    tensors = load_file(path)
    tensors["layers.3.bias"] = tensors["layers.3.bias"].double()
    save_file(tensors, path)
    change_manifest(checkpoint, lambda m: m["files"].update({path.name: described(path)}))
    with pytest.raises(CheckpointError, match=r"\(layers\.3\.bias is float64\[8\], expected float32\[8\]\)"):
        small_run().load(checkpoint)
