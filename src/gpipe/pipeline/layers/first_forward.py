"""The forward of a micro-batch that will be recomputed: it has a graph that keeps no tensors, or none.

Without a graph torch picks other kernels for some operations, such as LSTMs and attention, and a recomputation would
differ in its bits. Building a graph takes a tenth of the forward of small layers, whatever it keeps. So layers run
without one where every operation is known to use the same kernels:

- modules of torch, by their class: `_SAME_WITHOUT_GRAPH`, each with a test of its bits;
- layers whose class declares it in its own body, `same_without_graph = True`, with the modules of its package below
  them.

Under autocast a step's first forward still has a graph: it converts the weights, for the recomputations too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gpipe.pipeline.batch_norm import MicroBatchNorm
from gpipe.pipeline.layers.structure import has_own_code
from gpipe.pipeline.microbatch import Payload, read_versions

_SAME_WITHOUT_GRAPH = frozenset(
    {
        nn.AdaptiveAvgPool2d,
        nn.AvgPool2d,
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.Conv1d,
        nn.Conv2d,
        nn.Dropout,
        nn.Embedding,
        nn.Flatten,
        nn.GELU,
        nn.GroupNorm,
        nn.Identity,
        nn.LayerNorm,
        nn.Linear,
        nn.MaxPool2d,
        nn.ModuleDict,
        nn.ModuleList,
        nn.ReLU,
        nn.Sequential,
        nn.SiLU,
        nn.Sigmoid,
        nn.Tanh,
    }
)


def is_same_without_graph(modules: Sequence[nn.Module]) -> bool:
    """Return whether a layer gives the same bits with and without a graph.

    Each output that is not one of its inputs then depends on all of its inputs and parameters.

    modules: the layer and all below it, the layer first.
    """
    layer = type(modules[0])
    home = layer.__module__.partition(".")[0] if vars(layer).get("same_without_graph", False) else None
    return all(
        kind in _SAME_WITHOUT_GRAPH
        or (issubclass(kind, MicroBatchNorm) and kind.__bases__[1] in _SAME_WITHOUT_GRAPH)
        or kind.__module__.partition(".")[0] == home
        for kind in set(map(type, modules))
    ) and not any(map(has_own_code, modules))


def find_differentiable(outputs: Payload, inputs: Payload, versions: Sequence[int], layer: nn.Module) -> list[bool]:
    """Return which outputs need a gradient; the layer ran without a graph, where it is the same.

    versions: those that the inputs had before, as the layer may have changed some in place.
    """
    now = read_versions(inputs.tensors)
    before = zip(inputs.tensors, inputs.differentiable, versions, now, strict=True)
    passed = {id(tensor): is_needed for tensor, is_needed, version, last in before if is_needed or last == version}
    is_needed = any(inputs.differentiable) or any(parameter.requires_grad for parameter in layer.parameters())
    return [
        passed.get(id(tensor), is_needed and (tensor.is_floating_point() or tensor.is_complex()))
        for tensor in outputs.tensors
    ]


class _NotSavedError(RuntimeError):
    """A forward needs a tensor that its graph did not keep."""


def _refuse_to_restore(_: Any) -> Tensor:
    raise _NotSavedError(  # if the layer's own forward differentiates, the caller runs it again
        "the loss or a layer reads a tensor that a layer of an earlier stage computed and kept; return it along with "
        "that layer's outputs, so that it travels"
    )


_WITHOUT_SAVED_TENSORS = saved_tensors_hooks(id, _refuse_to_restore)


def without_saved_tensors() -> AbstractContextManager[None]:
    """Let graphs made in the body keep no tensors, so that a forward needs no more memory than one without a graph.

    Layers that differentiate in their forward then fail with an error that `wants_saved_tensors` recognises.
    """
    return _WITHOUT_SAVED_TENSORS


def wants_saved_tensors(error: BaseException | None) -> bool:
    """Return whether a forward failed because it differentiates, with torch.autograd.grad or torch.func."""
    if error is None:
        return False
    is_refused = isinstance(error, _NotSavedError) or "support saved tensor hooks" in str(error)  # torch.func's words
    return is_refused or wants_saved_tensors(error.__cause__)


def wants_no_leaf(error: Exception) -> bool:
    """Return whether a forward failed because a layer changes its input in place, which torch forbids for leaves."""
    return "leaf Variable that requires grad" in str(error)


def as_leaves(inputs: Payload, *, as_views: bool) -> Payload:
    """Return a boundary input as the beginning of a graph without a backward.

    as_views: for autocast, which keeps a copy of each leaf that is no view, and the leaf itself, until the step ends.
    """
    leaves = [tensor.detach() for tensor in inputs.differentiable_tensors()]
    return inputs.replace_differentiable((leaf[...] if as_views else leaf).requires_grad_() for leaf in leaves)
