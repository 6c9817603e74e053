"""Where a stage's autograd graph begins, and where its backward begins.

The graph begins at a node that passes on the gradients of the boundary input unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpipe.pipeline._compat import apply_function
from gpipe.pipeline.microbatch import Payload


class _Entry(torch.autograd.Function):
    """The identity.

    A leaf's `.grad` would copy the gradient into the memory layout of the leaf. The kernels before the boundary would
    then add up in another order than in the plain model.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)  # view_as would give size-1 dimensions new strides

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.gradients[:] = gradients
        return (None,) * (2 + len(gradients))


_ANCHOR = torch.empty(0, requires_grad=True)  # makes autograd call _Entry's backward; gets no gradient itself


def enter_graph(inputs: Payload, gradients: list[Tensor | None]) -> Payload:
    """Return a boundary input as the beginning of a graph; its backward fills `gradients`."""
    if not any(inputs.differentiable):
        return inputs
    return inputs.replace_differentiable(apply_function(_Entry, gradients, _ANCHOR, *inputs.differentiable_tensors()))


def find_root(tensor: Tensor) -> GradientEdge | None:
    """Return where the backward of a stage's output begins; None for an output without one.

    This is torch's `get_gradient_edge` for a tensor that is not a leaf, with gradients enabled. A node in C++ keeps the
    graph alive. A node in Python does not, so a view's node must; torch's function makes it in two more contexts.
    """
    node = tensor.grad_fn
    if node is None:
        return get_gradient_edge(tensor) if tensor.requires_grad else None
    return GradientEdge(
        node, tensor.output_nr, tensor.view_as(tensor).grad_fn if isinstance(node, BackwardCFunction) else None
    )
