"""The optimiser that a run's settings describe."""

from collections.abc import Iterable
from dataclasses import asdict

import torch
from torch import nn

from gpipe.config import OptimizerConfig
from gpipe.training.optimizers import build_optimizer


def build_run_optimizer(
    settings: OptimizerConfig, parameters: Iterable[tuple[str, nn.Parameter]], rate: float, on_gpus: bool | None = None
) -> torch.optim.Optimizer:
    """Build the optimiser of named parameters, with a learning rate."""
    handled_elsewhere = ("name", "learning_rate", "times_batch_size", "clip_norm")
    own = {name: value for name, value in asdict(settings).items() if name not in handled_elsewhere}
    return build_optimizer(settings.name, parameters, rate, on_gpus=on_gpus, **own)
