"""What travels between layers: a tensor, or nested tuples, lists and dicts of tensors and None."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Structure: TypeAlias = int | tuple[str, tuple[Any, ...]] | None
"""The shape of a nest, without its tensors: None, the position of a tensor, or a container of structures.

A container is ("tuple" | "list", children) or ("dict", ((key, child), ...)): hashable, and JSON can carry it.
"""


class PayloadError(TypeError):
    """A value that cannot travel between layers."""


@dataclass(slots=True)
class Payload:
    """The tensors of a nest, each once, and how they were nested.

    Attributes:
        tensors: the distinct tensors, in order of first appearance. A tensor that appears twice in the nest is one
            entry, so that its gradients are summed in one place, in the plain model's order.
        structure: where each tensor stood.
        differentiable: whether a gradient is wanted for each tensor; the consumer computes it, the producer asks.
    """

    tensors: list[Tensor]
    structure: Structure
    differentiable: list[bool]

    @classmethod
    def of(cls, value: Any) -> Payload:
        """Take a nest apart.

        Raises:
            PayloadError: an entry is neither a dense tensor, None, nor a tuple, list or dict of them.
        """
        tensors: list[Tensor] = []
        structure = _flatten(value, tensors, {}, "")
        return cls(tensors, structure, [tensor.requires_grad for tensor in tensors])

    def value(self) -> Any:
        """Return the nest, put together again."""
        return unflatten(self.structure, self.tensors)


def unflatten(structure: Structure, tensors: Sequence[Tensor]) -> Any:
    """Put tensors back where `structure` says they stood."""
    if structure is None:
        return None
    if isinstance(structure, int):
        return tensors[structure]
    kind, children = structure
    if kind == "dict":
        return {key: unflatten(child, tensors) for key, child in children}
    items = [unflatten(child, tensors) for child in children]
    return tuple(items) if kind == "tuple" else items


def structure_from_json(value: Any) -> Structure:
    """Rebuild a structure from what JSON made of it (lists instead of tuples)."""
    if value is None or isinstance(value, int):
        return value
    kind, children = value
    if kind == "dict":
        return kind, tuple((key, structure_from_json(child)) for key, child in children)
    return kind, tuple(structure_from_json(child) for child in children)


def _flatten(value: Any, tensors: list[Tensor], positions: dict[int, int], path: str) -> Structure:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise PayloadError(
                f"the payload{path} is a tensor of layout {value.layout}; only dense tensors travel between layers: "
                "call .to_dense() in the layer that makes it"
            )
        # The caller's nest keeps every tensor alive meanwhile, so an id cannot be used twice.
        position = positions.setdefault(id(value), len(tensors))
        if position == len(tensors):
            tensors.append(value)
        return position
    if value is None:
        return None
    if type(value) in (tuple, list):
        children = tuple(_flatten(item, tensors, positions, f"{path}[{i}]") for i, item in enumerate(value))
        return type(value).__name__, children
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return "dict", tuple((k, _flatten(item, tensors, positions, f"{path}[{k!r}]")) for k, item in value.items())
    raise PayloadError(
        f"the payload{path} is {_describe(value)}; between layers only tensors, None, and tuples, lists and dicts with "
        "string keys of them can travel: make it a tensor, or keep it inside one layer"
    )


def _describe(value: Any) -> str:
    text = repr(value)
    return f"of type {type(value).__name__} ({text if len(text) <= 40 else text[:37] + '...'})"


def microbatch_sizes(batch_size: int, num_microbatches: int) -> list[int]:
    """Return the number of examples of each micro-batch: as even as possible, the larger ones first, none empty.

    A mini-batch with fewer examples than micro-batches makes as many micro-batches as it has examples.

    >>> microbatch_sizes(10, 4)
    [3, 3, 2, 2]
    >>> microbatch_sizes(2, 4)
    [1, 1]
    """
    parts = min(batch_size, num_microbatches)
    small, larger = divmod(batch_size, parts)
    return [small + 1] * larger + [small] * (parts - larger)


def batch_size_of(value: Any, what: str) -> int:
    """Return the length of the first dimension that all tensors of a nest share.

    Raises:
        ValueError: there is no tensor, a tensor without dimensions, an empty batch, or two different lengths.
    """
    tensors = Payload.of(value).tensors
    lengths = {tensor.shape[0] if tensor.ndim else None for tensor in tensors}
    if len(lengths) != 1 or None in lengths or 0 in lengths:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensor at all"
        raise ValueError(
            f"the {what} have the shapes {shapes}; every tensor needs the examples of the mini-batch, at least one, "
            "as its first dimension"
        )
    (length,) = lengths
    assert length is not None
    return length


def split(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut every tensor of a nest along its first dimension; the parts are views, nothing is copied."""
    payload = Payload.of(value)
    parts = [tensor.detach().split(list(sizes)) for tensor in payload.tensors]
    return [unflatten(payload.structure, [part[i] for part in parts]) for i in range(len(sizes))]


def merge(payloads: Sequence[Payload]) -> Any:
    """Put the outputs of the micro-batches of one mini-batch together, along the first dimension.

    Raises:
        ValueError: the outputs are not nested alike, or one is a scalar.
    """
    first = payloads[0]
    if any(payload.structure != first.structure for payload in payloads):
        raise ValueError("the outputs of the micro-batches are nested differently; return the same nest for each")
    if any(tensor.ndim == 0 for tensor in first.tensors):
        raise ValueError(
            "an output is a scalar, which cannot be put together over micro-batches: return one an example"
        )
    columns = zip(*(payload.tensors for payload in payloads), strict=True)
    return unflatten(first.structure, [torch.cat(column) for column in columns])
