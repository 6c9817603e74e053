"""The call of a model with nests, which its code may change, and whose outputs become plain nests."""

from __future__ import annotations

import operator
from collections import OrderedDict
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from gpipe.tracing.traced_tensor import TracedTensor


class ModelCall(nn.Module):
    """Calls a model with the parts of one nest: a tensor, a tuple of arguments, or a dict of keyword arguments."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        super().__init__()
        self.model = model
        self._kind = type(example)

    def forward(self, inputs: Any) -> Any:
        """Return the model's outputs as tensors, tuples, lists and dicts."""
        parts = open_nest(inputs)
        if self._kind is dict:
            outputs = self.model(**parts)
        else:
            outputs = self.model(*parts) if self._kind is tuple else self.model(parts)
        return _convert_outputs(outputs)


def open_nest(nest: Any) -> Any:
    """Return a traced nest as a nest of traced tensors, which the model's code may change as it may its own."""
    if type(nest) is not TracedTensor or not isinstance(nest.value, dict | tuple | list):
        return nest
    kind = type(nest.value)
    if isinstance(nest.value, dict):
        entries = {key: open_nest(operator.getitem(nest, key)) for key in nest.value}
        return OrderedDict(entries) if kind is OrderedDict else entries
    parts = [open_nest(operator.getitem(nest, position)) for position in range(len(nest.value))]
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def _convert_outputs(outputs: Any) -> Any:
    """Return outputs as tensors, tuples, lists and dicts; of a dataclass, only what is not None."""
    if type(outputs) is TracedTensor:
        return _convert_outputs(dict(outputs.items())) if isinstance(outputs.value, dict) else outputs
    if is_dataclass(outputs):
        named = ((field.name, getattr(outputs, field.name)) for field in fields(outputs))
        found = {name: _convert_outputs(value) for name, value in named if value is not None}
        return next(iter(found.values())) if len(found) == 1 else found
    if isinstance(outputs, dict):
        return {key: _convert_outputs(value) for key, value in outputs.items()}
    if isinstance(outputs, tuple | list):
        return (list if isinstance(outputs, list) else tuple)(_convert_outputs(value) for value in outputs)
    return outputs
