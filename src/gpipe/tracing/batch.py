"""Tell which numbers in a recorded graph follow the number of examples, by recording it three times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from gpipe.tracing.errors import TracingError
from gpipe.tracing.tracer import Tracer

BATCHES = (3, 4, 33)
"""The numbers of examples that are tried: odd, even and large. Any number may be 1, which broadcasts."""


class OfBatch(NamedTuple):
    """factor * number of examples + offset, where a graph has a number."""

    factor: int
    offset: int


class Constant(NamedTuple):
    """A tensor that the code made out of nothing; where its size follows the batch, one slice of it."""

    tensor: Tensor
    shape: tuple[int | OfBatch, ...] | None  # to expand it to


class Numbering(NamedTuple):
    """A tensor that the code made out of nothing and that numbers the examples: 0, 1, 2, ..."""

    dtype: torch.dtype
    shape: tuple[int | OfBatch, ...]


class FreeArguments(NamedTuple):
    """The arguments of a node, with OfBatch in place of numbers that follow the batch."""

    args: Any
    kwargs: Any


def are_equal(first: fx.Graph, second: fx.Graph, tracers: Sequence[Tracer]) -> bool:
    """Return whether two graphs have the same operations on the same tensors, constants and numbers."""
    rows = [list(graph.nodes) for graph in (first, second)]
    own, other = (tracer.constants for tracer in tracers)
    if own.keys() != other.keys() or not all(
        own[name].shape == other[name].shape and torch.equal(own[name], other[name]) for name in own
    ):
        return False
    position = {node: number for row in rows for number, node in enumerate(row)}

    def describe(node: fx.Node) -> Any:
        arguments = map_arg((node.args, node.kwargs), lambda used: f"node {position[used]}")
        return node.op, node.target, repr(arguments)

    return [describe(node) for node in rows[0]] == [describe(node) for node in rows[1]]


def find_of_batch(
    graphs: Sequence[fx.Graph], tracers: Sequence[Tracer]
) -> tuple[dict[fx.Node, FreeArguments], dict[str, Constant | Numbering]]:
    """Return the arguments of each node of the first graph, and its constants, for any number of examples.

    Raises:
        TracingError: other operations run for another number of examples, or on numbers that do not follow it linearly.
    """
    rows = [list(graph.nodes) for graph in graphs]
    if len({tuple((node.op, node.target) for node in row) for row in rows}) != 1:
        raise TracingError(
            "the model runs other operations for another number of examples; name what does, leaves=[...]"
        )
    position = {node: number for row in rows for number, node in enumerate(row)}
    found = {}
    for nodes in zip(*rows, strict=True):
        place = f"{nodes[0].op} {nodes[0].target}"
        args = _join([node.args for node in nodes], position, place)
        found[nodes[0]] = FreeArguments(args, _join([node.kwargs for node in nodes], position, place))
    constants = {
        name: _join_constants([tracer.constants[name] for tracer in tracers], name) for name in tracers[0].constants
    }
    return found, constants


def _join(values: Sequence[Any], position: dict[fx.Node, int], place: str) -> Any:
    first = values[0]
    if isinstance(first, fx.Node):
        if len({position[value] for value in values}) != 1:
            raise TracingError(f"{place} takes another tensor for another number of examples; name it in leaves=[...]")
        return first
    if isinstance(first, tuple | list):
        items = [_join(parts, position, place) for parts in zip(*values, strict=True)]
        return items if isinstance(first, list) else tuple(items)
    if isinstance(first, dict):
        return {key: _join([value[key] for value in values], position, place) for key in first}
    if isinstance(first, slice):
        ends = [[value.start, value.stop, value.step] for value in values]
        return slice(*(_join(parts, position, place) for parts in zip(*ends, strict=True)))
    if all(value == first or value is first for value in values):
        return first
    return _line(values, place)


def _line(values: Sequence[Any], place: str) -> OfBatch:
    factor, rest = divmod(values[1] - values[0], BATCHES[1] - BATCHES[0]) if type(values[0]) is int else (0, 1)
    offset = values[0] - factor * BATCHES[0] if rest == 0 else 0
    if rest or any(value != factor * batch + offset for value, batch in zip(values, BATCHES, strict=True)):
        raise TracingError(
            f"{place} has {values} for {BATCHES} examples, which does not follow their number; name the submodule in "
            "which it happens, leaves=['...']"
        )
    return OfBatch(factor, offset)


def _join_constants(tensors: Sequence[Tensor], name: str) -> Constant | Numbering:
    first = tensors[0]
    if first.is_meta:
        raise TracingError(
            f"the model is on the meta device, where {name}, which its code makes there, has no numbers; give the "
            "model on another device"
        )
    if all(tensor.shape == first.shape for tensor in tensors):
        if all(torch.equal(tensor, first) for tensor in tensors):
            return Constant(first, None)
        raise TracingError(f"{name} has other values for another number of examples; name what makes it, leaves=[...]")
    shape = _join([tuple(tensor.shape) for tensor in tensors], {}, name)
    is_number = first.dtype is not torch.bool and not first.is_complex()
    if is_number and all(
        torch.equal(tensor.flatten(), torch.arange(size, dtype=tensor.dtype, device=tensor.device))
        for tensor, size in zip(tensors, BATCHES, strict=True)
    ):
        return Numbering(first.dtype, shape)
    for dimension, size in enumerate(shape):
        if isinstance(size, OfBatch):
            tensors = [tensor.narrow(dimension, 0, 1) for tensor in tensors]
    if not torch.equal(tensors[0].expand(first.shape), first):
        raise TracingError(f"{name} has other values for each example; name what makes it, leaves=[...]")
    return Constant(tensors[0].clone(), shape)
