"""Where a number that is not finite comes from: a look at the output of every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe.pipeline.microbatch import Payload

if TYPE_CHECKING:
    from gpipe.pipeline.stage import Stage


class NonFinite(NamedTuple):
    """An output that is not finite; the least of several is the one that came first in the model.

    Attributes:
        layer: its index in the model; the number of layers where it is the loss.
        replica: the pipeline.
        micro_batch: its index in the mini-batch of that pipeline.
        stage: the layer's.
        name: of the layer's class, or "the loss".
    """

    layer: int
    replica: int
    micro_batch: int
    stage: int
    name: str

    def __str__(self) -> str:
        """Say where it is."""
        what = self.name if self.name == _LOSS else f"layer {self.layer} ({self.name})"
        return f"{what} in stage {self.stage}, micro-batch {self.micro_batch} of replica {self.replica}"


_LOSS = "the loss"


class Probe:
    """Notes, for one process, the first output of each micro-batch that is not finite.

    Args:
        replica: the process's pipeline.
    """

    def __init__(self, replica: int) -> None:
        self.found: list[NonFinite] = []
        self._replica = replica
        self._seen: set[int] = set()  # micro-batches

    def watch(self, stage: Stage, micro_batch: int, index: int, layer: nn.Module) -> nn.Module:
        """Return a module that does what the layer does, and looks at what comes out."""
        return _Watched(self, stage, micro_batch, index, layer)

    def look_at_loss(self, stage: Stage, micro_batch: int, loss: Tensor) -> None:
        """Look at the loss of a micro-batch."""
        self._look(stage, micro_batch, max(stage.layers) + 1, _LOSS, [loss])

    def look(self, stage: Stage, micro_batch: int, index: int, layer: nn.Module, output: Any) -> None:
        """Look at the output of a layer."""
        self._look(stage, micro_batch, index, type(layer).__name__, Payload.of(output).tensors)

    def _look(self, stage: Stage, micro_batch: int, index: int, name: str, tensors: list[Tensor]) -> None:
        if micro_batch not in self._seen and not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
            self._seen.add(micro_batch)
            self.found.append(NonFinite(index, self._replica, micro_batch, stage.index, name))


class _Watched(nn.Module):
    def __init__(self, probe: Probe, stage: Stage, micro_batch: int, index: int, layer: nn.Module) -> None:
        super().__init__()
        self._arguments = probe, stage, micro_batch, index
        self._layer = (layer,)  # not a child: its mode and its names are left alone

    def forward(self, value: Any) -> Any:
        probe, stage, micro_batch, index = self._arguments
        (layer,) = self._layer
        output = layer(value)
        probe.look(stage, micro_batch, index, layer, output)
        return output
