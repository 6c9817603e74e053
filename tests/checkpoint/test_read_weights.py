"""A model that begins with another run's weights: what is taken, what stays, and what is refused."""

from pathlib import Path

import pytest
import torch

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.manifest import Position
from tests.training.small_run import SmallRun, small_run

HEAD = {"layers.5.weight", "layers.5.bias"}


@pytest.fixture
def pretrained() -> SmallRun:
    """A run of two stages after three steps, whose averages differ from its weights."""
    run = small_run((2, 4))
    run.train(3)
    return run


def save(folder: Path, run: SmallRun, *, with_ema: bool = True) -> Path:
    config = {"model": {"family": "small", "width": 8}}
    return run.save(folder, Position(3, 0, 3, 0), with_ema=with_ema, config=config)


@pytest.mark.parametrize("partitions", [(6,), (1, 2, 3)])
def test_everything_but_the_classifier_begins_with_the_averages(
    tmp_path: Path, pretrained: SmallRun, partitions: tuple[int, ...]
) -> None:
    run = small_run(partitions, seed=1, num_classes=3)
    before, given = run.tensors(), pretrained.tensors()
    assert not torch.equal(given["ema: layers.0.0.weight"], given["weights: layers.0.0.weight"])
    assert not torch.equal(given["ema: layers.0.1.running_mean"], given["weights: layers.0.1.running_mean"])
    run.begin(save(tmp_path, pretrained), replaced=HEAD)
    found = run.tensors()
    assert found.keys() == before.keys()
    for key, tensor in found.items():
        name = key.partition(": ")[2]
        assert torch.equal(tensor, before[key] if name in HEAD else given[f"ema: {name}"]), key
    assert found["weights: layers.0.1.num_batches_tracked"] == 3
    assert run.pipeline.step == 0


def test_everything_begins_with_the_weights_where_the_checkpoint_has_no_averages(
    tmp_path: Path, pretrained: SmallRun
) -> None:
    run = small_run(seed=1)
    run.begin(save(tmp_path, pretrained, with_ema=False))
    found, given = run.tensors(), pretrained.tensors()
    for name in run.pipeline.layers.state_dict(prefix="layers."):
        assert torch.equal(found[f"ema: {name}"], given[f"weights: {name}"]), name
        assert torch.equal(found[f"weights: {name}"], given[f"weights: {name}"]), name


def test_the_layers_of_all_stages_that_differ_are_named_with_the_settings(tmp_path: Path, pretrained: SmallRun) -> None:
    path = save(tmp_path, pretrained)
    run = small_run((3, 1, 2), seed=1, width=16)
    before = run.tensors()
    with pytest.raises(CheckpointError) as raised:
        run.begin(path, replaced=HEAD, settings={"family": "small", "width": 16})
    message = str(raised.value)
    assert "layers 3, 4 differ (layers.3.weight is float32[8, 64] there, float32[16, 64] here;" in message
    assert "more tensors); model.width is 8 there, 16 here: build the model" in message
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.tensors().items())


def test_another_number_of_classes_is_a_difference_where_the_classifier_is_kept(
    tmp_path: Path, pretrained: SmallRun
) -> None:
    run = small_run(num_classes=3)
    with pytest.raises(CheckpointError, match=r"layer 5 differs \(layers\.5\.weight is float32\[6, 8\] there"):
        run.begin(save(tmp_path, pretrained))
