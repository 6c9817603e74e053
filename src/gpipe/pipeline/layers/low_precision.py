"""Tensors that travel between layers in autocast's low precision, where the receiving layer wants that.

    layer 3 --- float32 --- conversion --- bfloat16 ---> layer 4      with every cut, also with none
    [layer 3 --- float32 --- conversion] === bfloat16 ===> [layer 4]  half the bytes over the boundary, both ways

A fully connected layer or a convolution converts its input first of all, so an earlier conversion changes no bit. Other
layers must ask for it, since it may change their results: a sum with their input, say, is then rounded too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpipe.pipeline.layers.structure import has_own_code
from gpipe.pipeline.microbatch import Payload

_CONVERT_FIRST = {
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
}  # fmt: skip


def wants_low_precision(layer: nn.Module) -> bool:
    """Return whether a layer wants its input in autocast's precision.

    If it has an attribute of this name, that decides. Otherwise layers want it that first convert their input anyway.
    """
    if (said := getattr(layer, "wants_low_precision", None)) is not None:
        return bool(said)
    if has_own_code(layer) or layer._backward_hooks or layer._backward_pre_hooks:
        return False
    if type(layer) is nn.Sequential and len(layer) > 0:
        return wants_low_precision(layer[0])
    # Padding that repeats values adds up their gradients, in the input's precision.
    return type(layer) in _CONVERT_FIRST and getattr(layer, "padding_mode", "zeros") == "zeros"


def lower(payload: Payload) -> Payload:
    """Return a payload whose float32 tensors have the type that autocast computes in, where it is on."""
    return payload.replace([_lower(tensor) for tensor in payload.tensors])


def _lower(tensor: Tensor) -> Tensor:
    device_type = tensor.device.type
    if tensor.dtype != torch.float32 or not torch.is_autocast_enabled(device_type):
        return tensor
    dtype = torch.get_autocast_dtype(device_type)
    return tensor.to(dtype)
