"""A model that begins with another run's weights: what is taken, what stays, and what is refused."""

from pathlib import Path

import pytest
import torch
from small_run import SmallRun, small_run

from gpipe.checkpoint.entries import Position
from gpipe.checkpoint.errors import CheckpointError

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
def test_everything_but_the_classifier_is_taken(
    tmp_path: Path, pretrained: SmallRun, partitions: tuple[int, ...]
) -> None:
    run = small_run(partitions, seed=1, num_classes=3)
    before, given = run.tensors(), pretrained.tensors()
    run.begin(save(tmp_path, pretrained), replaced=HEAD)
    found = run.tensors()
    assert found.keys() == before.keys()
    for name, tensor in found.items():
        source = before if name.partition(": ")[2] in HEAD else given
        assert torch.equal(tensor, source[name]), name
    assert not torch.equal(found["ema: layers.0.0.weight"], found["weights: layers.0.0.weight"])
    assert found["weights: layers.0.1.num_batches_tracked"] == 3
    assert run.pipeline.step == 0


def test_averages_begin_with_the_weights_where_the_checkpoint_has_none(tmp_path: Path, pretrained: SmallRun) -> None:
    run = small_run(seed=1)
    run.begin(save(tmp_path, pretrained, with_ema=False))
    found = run.tensors()
    for name in run.pipeline.layers.state_dict(prefix="layers."):
        assert torch.equal(found[f"ema: {name}"], found[f"weights: {name}"]), name


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
