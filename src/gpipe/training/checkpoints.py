"""What a training's checkpoints have, and which of them it resumes from."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gpipe.checkpoint.content import OptimizerState
from gpipe.checkpoint.errors import CheckpointError, DamagedCheckpoint
from gpipe.checkpoint.folder import list_newest_first
from gpipe.checkpoint.format import parse_parameter
from gpipe.checkpoint.manifest import Manifest
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


def load_newest(
    folder: Path | None, load: Callable[[Path], Manifest], say: Callable[[str], None]
) -> tuple[Path, Manifest] | None:
    """Load a folder's newest undamaged checkpoint, and warn of damaged ones.

    Args:
        folder: the folder of the checkpoints; None has none.
        load: loads one.
        say: prints a warning.

    Returns:
        The checkpoint's folder and manifest; None if there are no checkpoints.

    Raises:
        CheckpointError: all are damaged; a new run would silently overwrite them.
    """
    paths = list_newest_first(folder) if folder is not None else []
    for path in paths:
        try:
            return path, load(path)
        except DamagedCheckpoint as damage:
            say(f"warning: {damage}")
    if paths:
        raise CheckpointError(f"{folder} has {len(paths)} checkpoints, all of them damaged: remove it to start anew.")
    return None
