"""Copies of layers and payloads whose tensors have shapes but no data."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpipe.pipeline.microbatch import Payload
from gpipe.planning.errors import layer_error

_REMEDY = "give it a __deepcopy__, or give partition_layers your own costs"


class _Constants(TorchFunctionMode):
    """Copies tensors in a copied layer that are neither parameters nor buffers, as shapes without data.

    Attributes:
        copies: all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Copy a tensor, and leave all else as it is."""
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        constant, memo = args
        copied = torch.empty(constant.shape, dtype=constant.dtype, requires_grad=constant.requires_grad)
        memo[id(constant)] = copied
        self.copies.append(copied)
        return copied


def copy_layers(layers: Sequence[nn.Module]) -> tuple[list[nn.Module], list[Tensor]]:
    """Copy layers, and return also the tensors that they keep besides parameters and buffers; within FakeTensorMode.

    Raises:
        ValueError: a layer cannot be copied.
    """
    memos = [_make_memo(layer) for layer in layers]
    copies = []
    with _Constants() as constants:
        for index, (layer, memo) in enumerate(zip(layers, memos, strict=True)):
            try:
                copies.append(copy.deepcopy(layer, memo))
            except Exception as error:
                name = f"Layer {index} ({type(layer).__name__})"
                raise layer_error(name, error, "cannot be copied", _REMEDY) from error
    return copies, constants.copies


def _make_memo(layer: nn.Module) -> dict[int, Any]:
    """Return a deepcopy memo that gives a layer's parameters and buffers copies of the same shapes, without data."""
    memo: dict[int, Any] = {id(buffer): torch.empty(buffer.shape, dtype=buffer.dtype) for buffer in layer.buffers()}
    for parameter in layer.parameters():
        fake = torch.empty(parameter.shape, dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for value in chain.from_iterable(vars(module).values() for module in layer.modules()):
        if isinstance(value, torch.Generator):  # its state is a tensor
            memo[id(value)] = torch.Generator()
    return memo


def copy_payload(value: Any) -> Payload:
    """Copy the tensors of a nest of inputs or targets likewise."""
    payload, _ = Payload.of_mini_batch(value)
    payload.tensors = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in payload.tensors]
    return payload
