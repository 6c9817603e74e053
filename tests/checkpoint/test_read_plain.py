"""A checkpoint's weights without a pipeline, compared with the pipeline that saved them."""

from pathlib import Path

import pytest
import torch

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.manifest import Position
from gpipe.checkpoint.read import load_layers
from tests.training.small_run import SmallRun, small_layers, small_run


@pytest.fixture(scope="module")
def trained() -> SmallRun:
    """A run of three stages after three steps, whose averages differ from its weights."""
    run = small_run((1, 2, 3))
    run.train(3)
    return run


def save(folder: Path, run: SmallRun, *, with_ema: bool) -> Path:
    return run.save(folder, Position(3, 0, 3, 0), with_ema=with_ema)


@pytest.mark.parametrize(
    ("with_ema", "averages", "kind"), [(True, True, "ema"), (True, False, "weights"), (False, True, "weights")]
)
def test_the_layers_get_the_averages_where_there_are_any(
    tmp_path: Path, trained: SmallRun, with_ema: bool, averages: bool, kind: str
) -> None:
    layers = small_layers()
    manifest = load_layers(save(tmp_path, trained, with_ema=with_ema), layers, averages=averages)
    expected = {name.partition(": ")[2]: value for name, value in trained.tensors().items() if name.startswith(kind)}
    found = layers.state_dict(prefix="layers.")
    assert found.keys() == expected.keys() and manifest.position.step == 3
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_another_model_is_refused(tmp_path: Path, trained: SmallRun) -> None:
    path = save(tmp_path, trained, with_ema=True)
    with pytest.raises(CheckpointError, match=r"is of a model with 6 layers, but this one has 5: build the model"):
        load_layers(path, small_layers()[:5])
    with pytest.raises(
        CheckpointError, match=r"does not fit this model in its ema: layers? .* differ.*: build the model"
    ):
        load_layers(path, small_layers(width=16))


def test_a_damaged_file_is_refused_and_changes_nothing(tmp_path: Path, trained: SmallRun) -> None:
    path, layers = save(tmp_path, trained, with_ema=False), small_layers()
    file = path / "weights-2.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"weights-2\.safetensors does not have the SHA-256 of its manifest"):
        load_layers(path, layers)
    assert all(tensor.is_meta for tensor in layers.state_dict().values())
