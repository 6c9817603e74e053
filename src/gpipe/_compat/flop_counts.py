"""FLOPs of operations: torch's counts, and ours where torch has none or a wrong one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from gpipe._compat.torch_description import TorchDispatchMode

_aten = torch.ops.aten


class FlopCounter(TorchDispatchMode):
    """Counts the total FLOPs of the operations inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count its FLOPs."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.total += count_flops(func, args, kwargs, result)
        return result


def count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Count the FLOPs of one operation: of products, convolutions and attention; a multiply-add is 2, all else 0."""
    packet = func.overloadpacket
    if packet in _COUNTS:
        return _COUNTS[packet](args)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    return 0


def _attention(args: tuple[Any, ...]) -> int:
    query, key, value = (tuple(tensor.shape) for tensor in args[:3])
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(args: tuple[Any, ...]) -> int:
    gradient, query, key, value = (tuple(tensor.shape) for tensor in args[:4])
    return int(sdpa_backward_flop_count(gradient, query, key, value))


def _convolution_backward(args: tuple[Any, ...]) -> int:
    """Count each gradient like the forward pass, because each of its products has one counterpart per gradient."""
    gradient, inputs, weight = (list(tensor.shape) for tensor in args[:3])
    transposed, (of_inputs, of_weight, _) = args[7], args[10]
    return int(conv_flop_count(inputs, weight, gradient, transposed) * (of_inputs + of_weight))


def _matrix_vector(args: tuple[Any, ...]) -> int:
    """Count a product of a matrix, or a vector, and a vector: the last argument."""
    return 2 * int(args[-2].numel())


def _recurrent(args: tuple[Any, ...]) -> int:
    """Count an LSTM layer on a CPU: each step of each example multiplies by two matrices."""
    inputs, of_inputs, of_state = args[:3]
    return 2 * int(inputs.numel() // inputs.shape[-1] * (of_inputs.numel() + of_state.numel()))


def _trilinear(args: tuple[Any, ...]) -> int:
    """Count a sum of products of three tensors, each of which is repeated along some dimensions."""
    shapes = []
    for tensor, repeated in zip(args[:3], args[3:6], strict=True):
        shape = list(tensor.shape)
        for dimension in sorted(repeated):
            shape.insert(dimension, 1)
        shapes.append(shape)
    return int(2 * math.prod(map(max, *shapes)))


# Operations that torch's counter lacks, such as fused attention on CPUs, or counts wrongly: in the weight gradient of a
# convolution it ignores groups.
_COUNTS: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten.convolution_backward: _convolution_backward,
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten.mkldnn_rnn_layer_backward: lambda args: 2 * _recurrent(args),
    _aten.mv: _matrix_vector,
    _aten.dot: _matrix_vector,
    _aten.addmv: _matrix_vector,
    _aten._trilinear: _trilinear,
}
