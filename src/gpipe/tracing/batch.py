"""Find which numbers in a recorded graph depend on the number of examples, by recording it three times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from gpipe.tracing.errors import TracingError
from gpipe.tracing.tracer import Tracer

Refuse: TypeAlias = Callable[[str], TracingError]
"""Returns an error that tells what the code does at a node, and where."""

BATCHES = (3, 4, 33)
"""The numbers of examples to try: odd, even and large. Not 1, which broadcasts."""


@dataclass(frozen=True)
class OfBatch:
    """factor * number of examples + offset, in place of a number in a graph."""

    factor: int
    offset: int


class Constant(NamedTuple):
    """A tensor that the code made from no input; if its size depends on the batch, one slice of it."""

    tensor: Tensor
    shape: tuple[int | OfBatch, ...] | None  # the shape to which it is expanded
    is_contiguous: bool  # once it is expanded; code may rely on that, as view() does


class Numbering(NamedTuple):
    """A tensor that the code made from no input and that numbers the examples: 0, 1, 2, ..."""

    dtype: torch.dtype
    shape: tuple[int | OfBatch, ...]


def are_equal(first: Tracer, second: Tracer) -> bool:
    """Return whether two recordings have the same operations on the same tensors, constants and numbers."""
    rows = [list(tracer.graph.nodes) for tracer in (first, second)]
    own, other = first.constants, second.constants
    if own.keys() != other.keys() or not all(_has_values(own[name], other[name]) for name in own):
        return False
    position = {node: number for row in rows for number, node in enumerate(row)}

    def describe(node: fx.Node) -> Any:
        arguments = map_arg((node.args, node.kwargs), lambda used: f"node {position[used]}")
        return node.op, node.target, repr(arguments)

    return [describe(node) for node in rows[0]] == [describe(node) for node in rows[1]]


def are_sizes_read(tracers: Sequence[Tracer]) -> bool:
    """Return whether the code reads a size other than the number of examples; a multiple of it counts as another."""
    rows = [tracer.sizes_read() for tracer in tracers]
    return len(set(map(len, rows))) != 1 or any(sizes != BATCHES for sizes in zip(*rows, strict=True))


def find_of_batch(
    tracers: Sequence[Tracer],
) -> tuple[dict[fx.Node, tuple[Any, Any]], dict[str, Constant | Numbering]]:
    """Return the args and kwargs of each node of the first recording, and its constants, for any number of examples.

    OfBatch is in place of numbers that depend on it.

    Raises:
        TracingError: for another number of examples other operations run, or numbers are not linear in it.
    """
    rows = [list(tracer.graph.nodes) for tracer in tracers]
    for nodes in zip_longest(*rows):
        if len({None if node is None else (node.op, node.target) for node in nodes}) != 1:
            at = nodes[0] or rows[0][-1]
            raise tracers[0].refuse(at, "runs different operations for a different number of examples")
    position = {node: number for row in rows for number, node in enumerate(row)}
    found = {
        nodes[0]: _join([(node.args, node.kwargs) for node in nodes], position, partial(tracers[0].refuse, nodes[0]))
        for nodes in zip(*rows, strict=True)
    }
    makers = {str(node.target): node for node in rows[0] if node.op == "get_attr"}
    constants = {
        name: _join_constants([tracer.constants[name] for tracer in tracers], partial(tracers[0].refuse, makers[name]))
        for name in tracers[0].constants
    }
    return found, constants


def _join(values: Sequence[Any], position: dict[fx.Node, int], refuse: Refuse) -> Any:
    first = values[0]
    if isinstance(first, fx.Node):
        if len({position[value] for value in values}) != 1:
            raise refuse("takes a different tensor for a different number of examples")
        return first
    if isinstance(first, tuple | list):
        if len(set(map(len, values))) != 1:
            raise refuse("takes a list whose length depends on the number of examples")
        items = [_join(parts, position, refuse) for parts in zip(*values, strict=True)]
        return items if isinstance(first, list) else tuple(items)
    if isinstance(first, dict):
        return {key: _join([value[key] for value in values], position, refuse) for key in first}
    if isinstance(first, slice):
        ends = [[value.start, value.stop, value.step] for value in values]
        return slice(*(_join(parts, position, refuse) for parts in zip(*ends, strict=True)))
    if all(value == first or value is first or repr(value) == repr(first) for value in values):  # such as nan
        return first
    return _fit_line(values, refuse)


def _fit_line(values: Sequence[Any], refuse: Refuse) -> OfBatch:
    factor, rest = divmod(values[1] - values[0], BATCHES[1] - BATCHES[0]) if type(values[0]) is int else (0, 1)
    offset = values[0] - factor * BATCHES[0] if rest == 0 else 0
    if rest or any(value != factor * batch + offset for value, batch in zip(values, BATCHES, strict=True)):
        raise refuse(f"computes with {(*values,)} for {BATCHES} examples, which is not linear in their number")
    return OfBatch(factor, offset)


def _join_constants(tensors: Sequence[Tensor], refuse: Callable[..., TracingError]) -> Constant | Numbering:
    first = tensors[0]
    if first.is_meta:
        raise refuse("makes a tensor on the meta device, where it has no values", "give the model on another device")
    if all(tensor.shape == first.shape for tensor in tensors):
        if all(_has_values(tensor, first) for tensor in tensors):
            return Constant(first, None, is_contiguous=True)
        raise refuse("uses a tensor that it made itself, whose values depend on the number of examples")
    shape = _join([tuple(tensor.shape) for tensor in tensors], {}, refuse)
    is_number = first.dtype is not torch.bool and not first.is_complex()
    if is_number and all(
        torch.equal(tensor.flatten(), torch.arange(size, dtype=tensor.dtype, device=tensor.device))
        for tensor, size in zip(tensors, BATCHES, strict=True)
    ):
        return Numbering(first.dtype, shape)
    for dimension, size in enumerate(shape):
        if isinstance(size, OfBatch):
            first = first.narrow(dimension, 0, 1)
    if not all(_has_values(first.expand(tensor.shape), tensor) for tensor in tensors):
        raise refuse("uses a tensor that it made itself, whose values depend on the example or the number of examples")
    return Constant(first.clone(), shape, is_contiguous=tensors[0].is_contiguous())


def _has_values(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same values, which may be nan."""
    is_nan = first.isnan()
    return torch.equal(is_nan, second.isnan()) and torch.equal(
        first.masked_fill(is_nan, 0), second.masked_fill(is_nan, 0)
    )
