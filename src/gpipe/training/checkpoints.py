"""What a training's checkpoints have."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from gpipe.checkpoint.content import OptimizerState
from gpipe.checkpoint.format import parse_parameter
from gpipe.pipeline.engine import Pipeline
from gpipe.pipeline.shared.sharded_optimizer import ShardedOptimizer
from gpipe.training.ema import Ema
from gpipe.training.optimizers import load_optimizer_state, named_parameters_of, optimizer_state


def get_tensors(pipeline: Pipeline, ema: Ema | None = None) -> dict[str, dict[str, Tensor]]:
    """Return this process's weights and averages, by kind and name; they share the pipeline's memory."""
    kinds: dict[str, dict[str, Tensor]] = {"weights": dict(pipeline.layers.state_dict(prefix="layers."))}
    if ema is not None:
        kinds["ema"] = ema.state()
    return kinds


def wrap_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Wrap an optimiser, built from (name, parameter) pairs, for checkpoints."""
    parameters = named_parameters_of(optimizer)
    read, load = partial(optimizer_state, optimizer), partial(load_optimizer_state, optimizer)
    if not isinstance(optimizer, ShardedOptimizer):
        return OptimizerState(type(optimizer).__name__, parameters, read, load)

    def gather() -> dict[str, Tensor]:
        found, order = optimizer.gather(read()), {name: number for number, name in enumerate(parameters)}
        return {key: found[key] for key in sorted(found, key=lambda key: order[parse_parameter(key)])}

    def load_own(state: Mapping[str, Tensor]) -> None:
        load({key: value for key, value in state.items() if optimizer.keeps(parameters[parse_parameter(key)])})

    return OptimizerState(type(optimizer.whole).__name__, parameters, gather, load_own)
