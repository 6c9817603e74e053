"""What a trainer refuses when it is made: settings and parts that would fail later, or train nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager
from inspect import signature
from typing import TYPE_CHECKING

from gpipe.training.evaluation import Metrics
from gpipe.training.loader import Loader

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from gpipe.pipeline.engine import Pipeline
    from gpipe.training.trainer import Trainer


def refuse_unfit(trainer: Trainer) -> None:
    """Refuse what a trainer was given but cannot use.

    Raises:
        TypeError: a part has another type than it needs.
        ValueError: a setting is out of range, a loader has no mini-batches, or the optimiser has other parameters.
    """
    for name in (
        "num_epochs", "max_steps", "evaluate_every_epochs", "evaluate_every_steps", "save_every_steps",
        "keep_checkpoints", "timeline_every_steps", "patience", "num_statistics_batches", "max_evaluation_batches",
    ):  # fmt: skip
        value = getattr(trainer, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, but it must be at least 1.")
    if trainer.non_finite not in ("stop", "skip"):
        raise ValueError(f"non_finite is {trainer.non_finite!r}: choose stop or skip.")
    if trainer.learning_rate is not None and not callable(trainer.learning_rate):
        raise TypeError(
            f"learning_rate is {trainer.learning_rate!r}: give a function of the number of finished steps, or None to "
            "leave the optimiser's as it is."
        )
    for name, loader in {"train_loader": trainer.train_loader, **trainer.evaluation_loaders}.items():
        if not isinstance(loader, Loader):
            raise TypeError(
                f"{name} is of type {type(loader).__name__}, which cannot resume within an epoch: give a "
                "gpipe.data.DatasetLoader of its data set, or what gpipe.training.loader.Loader describes."
            )
        if len(loader) == 0:
            raise ValueError(f"{name} has 0 mini-batches, expected 1 or more: check its data and its batch size.")
    for name in ("autocast", "evaluation_autocast"):
        if isinstance(getattr(trainer, name), AbstractContextManager):
            raise TypeError(
                f"{name} is a context, but each step needs its own: give a function that creates one, such as "
                "lambda: torch.autocast('cpu')."
            )
    if not isinstance(trainer.metrics, Metrics):
        raise TypeError(
            f"metrics is of type {type(trainer.metrics).__name__}: give an object with the methods of "
            "gpipe.training.evaluation.Metrics."
        )
    _refuse_optimizer(trainer.optimizer, trainer.pipeline)


def _refuse_optimizer(optimizer: Optimizer, pipeline: Pipeline) -> None:
    arguments = signature(optimizer.step).parameters.values()
    if any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in arguments):
        raise TypeError(
            f"the optimiser {type(optimizer).__name__} computes the loss several times per step, by a closure, but "
            "a trainer gives it the gradients of one: choose another, such as torch.optim.SGD."
        )
    own = {id(parameter) for parameter in pipeline.parameters()}
    if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "the optimiser has parameters that the pipeline does not train: create it from "
            "pipeline.named_parameters(), once the pipeline is made."
        )
