"""The memory that an operation uses internally, measured on this machine's CPU.

A convolution copies its tensors into blocks of channels, and a recurrent layer keeps a workspace whose size only the
library knows. Tensors without data show none of that. So each operation runs once on zeros of the same shapes, while
torch's allocator is watched. This takes the memory of one operation at a time, and as long as one micro-batch's step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpipe._compat.torch_description import tree_leaves, tree_map_only, unset_fake_temporarily, watch_allocations


class Taken(NamedTuple):
    """The memory that an operation took.

    Attributes:
        peak_bytes: the peak, including its outputs.
        outputs: the shape of each of its outputs; None if unknown.
    """

    peak_bytes: int
    outputs: tuple[torch.Size, ...] | None

    def complete(self, result: Any) -> Any:
        """Return a result without data, whose tensors have their real shapes.

        Torch's description of a recurrent layer gives an empty workspace.
        """
        if self.outputs is None:
            return result
        shapes = iter(self.outputs)

        def give_shape(tensor: Tensor) -> Tensor:
            shape = next(shapes)
            return tensor if tensor.shape == shape else tensor.new_empty(shape)

        return tree_map_only(Tensor, give_shape, result)


class OperationMemory:
    """Measures operations on a CPU, one of each kind: equal operations with equal shapes take the same memory.

    The number of threads counts too, as each may have its own buffer.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Taken] = {}

    def measure(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Taken:
        """Return the memory of an operation with given arguments, whose tensors may have no data."""
        key = run, torch.get_num_threads(), *map(_describe, tree_leaves((args, kwargs)))
        if key not in self._known:
            with unset_fake_temporarily():
                self._known[key] = _measure(run, args, kwargs)
        return self._known[key]


def _measure(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Taken:
    given, named = tree_map_only(Tensor, _fill, (args, kwargs))
    try:
        result, sizes = watch_allocations(lambda: run(*given, **named))
    except RuntimeError:  # such as multinomial, for which zeros are not probabilities: only its outputs count
        return Taken(0, None)
    outputs = tuple(leaf.shape for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
    return Taken(max(accumulate(sizes, initial=0)), outputs)


def _describe(argument: Any) -> Hashable:
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype
    return type(argument), repr(argument)


def _fill(tensor: Tensor) -> Tensor:
    """Return zeros with a tensor's shape and strides; memory does not depend on the values."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    values = torch.zeros(reach if tensor.numel() else 0, dtype=tensor.dtype)
    return values.as_strided(tensor.shape, tensor.stride())
