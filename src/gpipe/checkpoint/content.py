"""What a checkpoint saves and restores."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from gpipe.checkpoint.manifest import Position

Kinds = Mapping[str, Mapping[str, Tensor]]
"""This process's tensors by kind ("weights", and "ema" if there are averages) and by name, `layers.<i>.<name>`."""


@dataclass(frozen=True)
class OptimizerState:
    """An optimiser whose parameters have names; only its owner knows how it keeps its state.

    Attributes:
        name: the name of its class.
        parameters: the parameters that it trains, by name.
        read: returns the state as tensors called `<parameter name>/<slot>`. Replicas may divide the state among
            themselves, so every replica calls this, and the first one gets all of it.
        load: replaces the whole state by such tensors.
    """

    name: str
    parameters: Mapping[str, Tensor]
    read: Callable[[], Mapping[str, Tensor]]
    load: Callable[[Mapping[str, Tensor]], None]


@dataclass(frozen=True)
class Content:
    """Everything that goes into one checkpoint.

    Attributes:
        position: where the run stands.
        model: this process's tensors.
        optimizer: None saves no optimiser state.
        config: the run's settings, as JSON.
        results: what the run needs to resume, as JSON.
    """

    position: Position
    model: Kinds
    optimizer: OptimizerState | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> Kinds:
        """The tensors of the model and of the optimiser; every replica asks for them, even if it saves nothing."""
        return self.model if self.optimizer is None else {**self.model, "optimizer": self.optimizer.read()}

    def describe(self, num_layers: int) -> dict[str, Any]:
        """Return the fields of the manifest that all processes know, as JSON."""
        return {
            "position": asdict(self.position),
            "num_layers": num_layers,
            "optimizer": self.optimizer.name if self.optimizer is not None else None,
            "config": dict(self.config),
            "results": dict(self.results),
        }
