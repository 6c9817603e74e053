"""A trained network and its checkpoint, which most tests here read."""

from pathlib import Path

import pytest

from gpipe.checkpoint.manifest import Position
from tests.training.small_run import SmallRun, small_run

POSITION = Position(step=3, epoch=0, batch=3, seed=0)


@pytest.fixture
def trained() -> SmallRun:
    """A run of three stages after three steps, whose averages differ from its weights."""
    run = small_run((1, 2, 3))
    run.train(3)
    return run


@pytest.fixture
def checkpoint(trained: SmallRun, tmp_path: Path) -> Path:
    """Its checkpoint."""
    return trained.save(tmp_path / "checkpoints", POSITION, config={"seed": 0}, results={"best_top1": 0.5})
