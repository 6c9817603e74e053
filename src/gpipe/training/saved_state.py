"""What of a training goes into its checkpoints."""

from functools import partial

import torch
from torch import Tensor

from gpipe.checkpoint.state import OptimizerState
from gpipe.pipeline.engine import Pipeline
from gpipe.training.ema import Ema
from gpipe.training.optimizers import load_optimizer_state, named_parameters_of, optimizer_state


def model_tensors(pipeline: Pipeline, ema: Ema | None = None) -> dict[str, dict[str, Tensor]]:
    """Return this process's weights, and averages if there are any, by kind and name, sharing their memory."""
    kinds: dict[str, dict[str, Tensor]] = {"weights": dict(pipeline.layers.state_dict(prefix="layers."))}
    if ema is not None:
        kinds["ema"] = ema.state()
    return kinds


def saved_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Return an optimiser that was built from (name, parameter) pairs as checkpoints see it."""
    return OptimizerState(
        name=type(optimizer).__name__,
        parameters=named_parameters_of(optimizer),
        read=partial(optimizer_state, optimizer),
        load=partial(load_optimizer_state, optimizer),
    )
