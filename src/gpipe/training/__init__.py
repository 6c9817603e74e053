"""Train a pipeline: optimisers, learning rates, losses, metrics, averages, checkpoints, tracking and the loop.

    trainer = gpipe.training.Trainer(pipeline=pipeline, optimizer=optimizer, train_loader=loader)
    trainer.resume()
    trainer.train()

The names below are imported at first use, so that starting a run loads no torch.
"""

from importlib import import_module  # noqa: TID251 - for the names below
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe.training.ema import Ema as Ema
    from gpipe.training.tracking import Tracker as Tracker
    from gpipe.training.trainer import Trainer as Trainer

_PLACES = {"Ema": "ema", "Tracker": "tracking", "Trainer": "trainer"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
