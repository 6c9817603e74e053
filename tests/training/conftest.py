"""A training that never stopped, which others that stop are compared with."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from gpipe.training.summary import Summary
from gpipe.training.trainer import Trainer
from tests.training.small_run import small_trainer


@dataclass(frozen=True)
class Undisturbed:
    """A trainer that is done, what it returned, and its folder; tests only read it."""

    trainer: Trainer
    summary: Summary
    folder: Path


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("whole")
    trainer = small_trainer(folder)
    return Undisturbed(trainer, trainer.train(), folder)
