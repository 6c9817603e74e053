"""The current drop-path rate of a model."""

from timm.layers.drop import DropPath
from torch import nn


def set_drop_path(module: nn.Module, rate: float) -> None:
    """Set the probability that a path is dropped, for every timm ``DropPath`` in `module`.

    A training loop calls it at every step: the keep probability falls linearly over training (Real et al. 2019).
    Raises ValueError unless 0 <= rate < 1.
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"drop-path rate is {rate}, expected a probability in [0, 1): give 1 - keep probability.")
    for submodule in module.modules():
        if isinstance(submodule, DropPath):
            submodule.drop_prob = rate
