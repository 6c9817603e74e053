"""Loading: what one partitioning wrote another reads, and what begins with another run's weights."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.manifest import Manifest
from gpipe.checkpoint.read import export, load_layers
from tests.checkpoint.conftest import POSITION
from tests.training.small_run import SmallRun, assert_equal, small_layers, small_run

PARTITIONS = [(6,), (2, 4), (1, 2, 3), (1, 1, 1, 1, 1, 1)]
HEAD = {"layers.5.weight", "layers.5.bias"}


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


def test_an_exported_file_begins_a_run_as_its_checkpoint_does(checkpoint: Path, tmp_path: Path) -> None:
    export(checkpoint, tmp_path / "model.safetensors")
    first, second = small_run((1, 2, 3), seed=1), small_run((2, 4), seed=1)
    first.begin(checkpoint, replaced=HEAD)
    second.begin(tmp_path / "model.safetensors", replaced=HEAD)
    assert_equal(second, first.tensors())


def test_an_export_that_was_killed_does_not_hinder_the_next(checkpoint: Path, tmp_path: Path) -> None:
    export(checkpoint, tmp_path / "expected.safetensors")
    (tmp_path / ".partial.model.safetensors").write_bytes(b"half of it")
    export(checkpoint, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
    assert not (tmp_path / ".partial.model.safetensors").exists()


def test_a_file_that_does_not_fit_is_refused_as_a_checkpoint_is(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    export(checkpoint, file)
    with pytest.raises(CheckpointError, match=r"does not fit this model in its weights: layers 3, 4, 5 differ \("):
        small_run(width=6).begin(file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model.safetensors is not a file of a model's weights \(.*\): choose"):
        small_run().begin(file)


def test_a_file_of_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"conv1.weight": torch.ones(2)}, file)
    with pytest.raises(
        CheckpointError, match=r"has the tensor conv1\.weight, which is not named like a layer's: it is of another "
    ):
        small_run().begin(file)


def test_tied_weights_can_be_saved(tmp_path: Path) -> None:
    first, second = small_run(), small_run(seed=1)
    for run in (first, second):
        run.pipeline.layers["5"].tied = run.pipeline.layers["5"].weight
    second.load_weights_alone(first.save(tmp_path, POSITION))
    assert torch.equal(second.pipeline.layers["5"].weight, first.pipeline.layers["5"].weight)
    assert second.pipeline.layers["5"].tied is second.pipeline.layers["5"].weight


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


@pytest.fixture
def pretrained() -> SmallRun:
    """A run of two stages after three steps, whose averages differ from its weights."""
    run = small_run((2, 4))
    run.train(3)
    return run


def save_pretrained(folder: Path, run: SmallRun, *, with_ema: bool = True) -> Path:
    config = {"model": {"family": "small", "width": 8}}
    return run.save(folder, POSITION, with_ema=with_ema, config=config)


@pytest.mark.parametrize("partitions", [(6,), (1, 2, 3)])
def test_everything_but_the_classifier_begins_with_the_averages(
    tmp_path: Path, pretrained: SmallRun, partitions: tuple[int, ...]
) -> None:
    run = small_run(partitions, seed=1, num_classes=3)
    before, given = run.tensors(), pretrained.tensors()
    assert not torch.equal(given["ema: layers.0.0.weight"], given["weights: layers.0.0.weight"])
    assert not torch.equal(given["ema: layers.0.1.running_mean"], given["weights: layers.0.1.running_mean"])
    run.begin(save_pretrained(tmp_path, pretrained), replaced=HEAD)
    found = run.tensors()
    assert found.keys() == before.keys()
    for key, tensor in found.items():
        name = key.partition(": ")[2]
        assert torch.equal(tensor, before[key] if name in HEAD else given[f"ema: {name}"]), key
    assert found["weights: layers.0.1.num_batches_tracked"] == 3
    assert run.pipeline.step == 0


def test_everything_begins_with_the_weights_if_the_checkpoint_has_no_averages(
    tmp_path: Path, pretrained: SmallRun
) -> None:
    run = small_run(seed=1)
    run.begin(save_pretrained(tmp_path, pretrained, with_ema=False))
    found, given = run.tensors(), pretrained.tensors()
    for name in run.pipeline.layers.state_dict(prefix="layers."):
        assert torch.equal(found[f"ema: {name}"], given[f"weights: {name}"]), name
        assert torch.equal(found[f"weights: {name}"], given[f"weights: {name}"]), name


def test_the_layers_of_all_stages_that_differ_are_named_with_the_settings(tmp_path: Path, pretrained: SmallRun) -> None:
    path = save_pretrained(tmp_path, pretrained)
    run = small_run((3, 1, 2), seed=1, width=16)
    before = run.tensors()
    with pytest.raises(CheckpointError) as raised:
        run.begin(path, replaced=HEAD, settings={"family": "small", "width": 16})
    message = str(raised.value)
    assert "layers 3, 4 differ (layers.3.weight is float32[8, 64] there, float32[16, 64] here;" in message
    assert "more tensors); model.width is 8 there, 16 here: build the model" in message
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.tensors().items())


def test_another_number_of_classes_is_a_difference_if_the_classifier_is_kept(
    tmp_path: Path, pretrained: SmallRun
) -> None:
    run = small_run(num_classes=3)
    with pytest.raises(CheckpointError, match=r"layer 5 differs \(layers\.5\.weight is float32\[6, 8\] there"):
        run.begin(save_pretrained(tmp_path, pretrained))


@pytest.mark.parametrize(
    ("with_ema", "averages", "kind"), [(True, True, "ema"), (True, False, "weights"), (False, True, "weights")]
)
def test_plain_layers_get_the_averages_if_there_are_any(
    tmp_path: Path, trained: SmallRun, with_ema: bool, averages: bool, kind: str
) -> None:
    layers = small_layers()
    manifest = load_layers(trained.save(tmp_path, POSITION, with_ema=with_ema), layers, averages=averages)
    expected = {name.partition(": ")[2]: value for name, value in trained.tensors().items() if name.startswith(kind)}
    found = layers.state_dict(prefix="layers.")
    assert found.keys() == expected.keys() and manifest.position.step == 3
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.data_ptr() % 64 == 0, f"{name}: kernels choose their order of additions by the address"


def test_plain_layers_of_another_model_are_refused(tmp_path: Path, trained: SmallRun) -> None:
    path = trained.save(tmp_path, POSITION)
    with pytest.raises(CheckpointError, match=r"is of a model with 6 layers, but this one has 5: build the model"):
        load_layers(path, small_layers()[:5])
    with pytest.raises(
        CheckpointError, match=r"does not fit this model in its ema: layers? .* differ.*: build the model"
    ):
        load_layers(path, small_layers(width=16))


def test_a_damaged_file_does_not_change_plain_layers(tmp_path: Path, trained: SmallRun) -> None:
    path, layers = trained.save(tmp_path, POSITION, with_ema=False), small_layers()
    flip_a_bit(path / "weights-2.safetensors")
    with pytest.raises(CheckpointError, match=r"weights-2\.safetensors does not match the SHA-256 in its manifest"):
        load_layers(path, layers)
    assert all(tensor.is_meta for tensor in layers.state_dict().values())
