"""Resuming: a damaged checkpoint is reported, and the previous one is loaded."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpipe.checkpoint.errors import CheckpointError, DamagedCheckpoint
from gpipe.checkpoint.folder import find_latest, list_newest_first
from gpipe.training.trainer import Trainer
from tests.training.conftest import Undisturbed
from tests.training.small_run import small_run, small_trainer


def flip_a_bit(checkpoint: Path) -> None:
    path = checkpoint / "optimizer-1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def lose_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def lose_all(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)


def lose_the_pointer(checkpoint: Path) -> None:
    flip_a_bit(checkpoint)
    (checkpoint.parent / "latest").unlink()


def take_the_name(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    (checkpoint.parent / "step-00000002").rename(checkpoint)


DAMAGES = [flip_a_bit, lose_the_manifest, lose_all, lose_the_pointer, take_the_name]


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What trainers print."""
    said: list[str] = []
    monkeypatch.setattr("gpipe.training.progress.Progress.message", lambda progress, text: said.append(text))
    return said


def interrupted(folder: Path) -> Trainer:
    """Train to step 7 of 12, with checkpoints after steps 2, 4 and 6."""
    trainer = small_trainer(folder, (2, 4), save_every_steps=2, evaluate_every_epochs=None)
    rate = trainer.learning_rate
    trainer.learning_rate = lambda step: 1 / 0 if step == 7 else rate(step)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    return trainer


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_previous_checkpoint_is_taken_and_training_ends_the_same(
    tmp_path: Path, messages: list[str], whole: Undisturbed, damage: Callable[[Path], None]
) -> None:
    interrupted(tmp_path / "run")
    newest = find_latest(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.name == "step-00000006"
    damage(newest)
    again = small_trainer(tmp_path / "run", (1, 5), evaluate_every_epochs=None, save_every_steps=2)
    assert again.resume() and again.pipeline.step == 4
    assert len(messages) == 1 and str(newest) in messages[0] and "\n" not in messages[0]
    again.train()
    for name, tensor in again.pipeline.layers.state_dict().items():
        assert torch.equal(tensor, whole.trainer.pipeline.layers.state_dict()[name]), name
    assert [path.name for path in list_newest_first(tmp_path / "run" / "checkpoints")] == [
        f"step-{step:08d}" for step in (12, 10, 8)
    ]


def test_a_damaged_checkpoint_that_was_named_is_refused(tmp_path: Path) -> None:
    trainer = interrupted(tmp_path)
    newest = tmp_path / "checkpoints" / "step-00000006"
    flip_a_bit(newest)
    with pytest.raises(DamagedCheckpoint, match=r"step-00000006/optimizer-1\.safetensors does not match the SHA-256"):
        trainer.resume(newest)


def test_if_all_are_damaged_training_does_not_start_anew(tmp_path: Path, messages: list[str]) -> None:
    trainer = interrupted(tmp_path)
    for path in list_newest_first(tmp_path / "checkpoints"):
        flip_a_bit(path)
    with pytest.raises(CheckpointError, match="has 3 checkpoints, all of them damaged: remove it to start anew"):
        trainer.resume()
    assert len(messages) == 3


def test_the_checkpoint_of_another_model_is_not_called_damaged(tmp_path: Path, messages: list[str]) -> None:
    interrupted(tmp_path)
    pipeline = small_run((2, 4)).pipeline
    other = small_trainer(
        tmp_path,
        (2, 4),
        pipeline=pipeline,
        optimizer=torch.optim.SGD(list(pipeline.named_parameters()), 0.1),
        ema=None,
    )
    with pytest.raises(CheckpointError, match="but this run uses SGD"):
        other.resume()
    assert messages == []
