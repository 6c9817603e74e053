"""Train a pipeline: optimisers, learning rates, losses, metrics, averages, checkpoints, tracking and the loop.

    trainer = gpipe.training.Trainer(pipeline=pipeline, optimizer=optimizer, train_loader=loader)
    trainer.resume()
    trainer.train()

Read trainer.py first. It uses:

    refusals.py          what is refused before the first step
    loader.py            what the data must offer
    losses.py            loss and metrics of a micro-batch; cross_entropy.py computes them in one pass
    optimizers.py        optimisers by name, with their state by parameter name
    learning_rate.py     functions of the number of finished steps
    ema.py               moving averages of weights
    evaluation.py        figures of a whole set; statistics.py first estimates those of batch norms
    checkpoints.py       what a checkpoint has
    endings.py           requests to stop, numbers that are not finite
    summary.py           the outcome, and the totals behind it
    tracking.py          metrics.jsonl; wandb_mirror.py and tensorboard_mirror.py show it elsewhere
    progress.py          what the terminal shows

numerics.py chooses kernels. The names below are imported at first use, so that starting a run loads no torch.
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
