"""Where a stage is: the layer now running, for messages and errors."""

from __future__ import annotations

from collections.abc import Container

from torch import nn
from torch.autograd.graph import Node

from gpipe.pipeline.job.errors import PipelineError, caused_by
from gpipe.pipeline.microbatch import Payload

_CHANGED = "modified by an inplace operation"  # torch's words
_FREED = "backward through the graph a second time"
_KEPT = (
    "; if the layer keeps a tensor for another layer, the loss or a later micro-batch, return it along with its "
    "outputs, so that it travels, or detach it (.detach())"
)
_CHANGED_LATER = (
    "; if the model trains well without a pipeline, a layer changed a buffer or a weight in a later micro-batch: let "
    "its forward use a copy (.clone()) of what it changes, or set rematerialize='always'"
)


class CurrentLayer:
    """The layer of a stage that is now running.

    Attributes:
        at: the layer's index in the model, and the layer. Without a layer, an index below 0 means the preparation of
            the inputs, 0 that no layer has begun yet, and any other the loss.
    """

    __slots__ = ("_stage", "at")

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self.at: tuple[int, nn.Module | None] = (0, None)

    def read(self) -> tuple[int, nn.Module | None]:
        """Return where the stage is, to `note` it later."""
        return self.at

    def note(self, at: tuple[int, nn.Module | None]) -> None:
        """Note where the stage is."""
        self.at = at

    def announce_backward(
        self, outputs: Payload, passed_by: Container[Node | None], index: int, layer: nn.Module
    ) -> None:
        """Note a layer when its backward begins, so that an error in it can name it.

        `passed_by` are the nodes of the layer's inputs: outputs with one of them belong to an earlier layer's backward.
        """
        for tensor in outputs.tensors:
            if tensor.grad_fn is not None and tensor.grad_fn not in passed_by:
                tensor.register_hook(lambda _: self.note((index, layer)))

    def describe(self, micro_batch: int, doing: str) -> str:
        """Return in words where the stage is: the micro-batch, the layer now running, and what it does."""
        layer, module = self.at
        if module is not None:
            name = f"layer {layer} ({type(module).__name__})"
        else:
            name = "the loss" if layer > 0 else "prepare_inputs" if layer < 0 else "its first layer"
        return f"stage {self._stage}, micro-batch {micro_batch}, {name}, {doing}"

    def locate(self, error: Exception, micro_batch: int, doing: str) -> PipelineError:
        """Return an error that says where `error` happened: in a layer or the loss."""
        layer, module = self.at
        doing = "loss" if module is None and layer > 0 and doing not in ("backward", "input gradients") else doing
        text = f"{self.describe(micro_batch, doing)}: {type(error).__name__}: {error}"
        text += _CHANGED_LATER if _CHANGED in str(error) else _KEPT if _FREED in str(error) else ""
        layer_index = None if module is None else layer
        return caused_by(error, text, stage=self._stage, micro_batch=micro_batch, layer=layer_index)
