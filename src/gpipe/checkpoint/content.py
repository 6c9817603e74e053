"""What is saved and brought back: tensors by kind, and an optimiser as a checkpoint sees it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Kinds = Mapping[str, Mapping[str, Tensor]]
"""This process's tensors by kind ("weights", and "ema" where there are averages) and by name, `layers.<i>.<name>`."""


@dataclass(frozen=True)
class OptimizerState:
    """An optimiser that knows its parameters by name; only its owner knows how it keeps its state.

    name: of its class. parameters: those that it trains, by name. read: returns the state as tensors called
    `<parameter name>/<slot>`. load: replaces the whole state by such tensors.
    """

    name: str
    parameters: Mapping[str, Tensor]
    read: Callable[[], Mapping[str, Tensor]]
    load: Callable[[Mapping[str, Tensor]], None]
