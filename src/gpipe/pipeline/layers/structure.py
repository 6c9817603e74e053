"""What a module is apart from its tensors' values: which layers do the same work."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None))
TIES = "_gpipe_ties"
"""An attribute of modules that have been in a pipeline: their copies of tied parameters, each with its group's mark.

So a later pipeline knows that they are tied. A deepcopy keeps a module's attributes, but not a parameter's.
"""
_MODULES_OWN = ("_parameters", "_buffers", "_modules", TIES)


def structure(module: nn.Module) -> Hashable:
    """Return what a module is apart from the values of its tensors; equal for modules that do the same work.

    A module with an attribute that is neither a plain value nor a nest of them equals no other. Attributes that the
    module's class names in `unread_in_forward` do not count.
    """
    others = *_MODULES_OWN, *getattr(type(module), "unread_in_forward", ())
    attributes = tuple((name, _freeze(value)) for name, value in sorted(vars(module).items()) if name not in others)
    tensors = tuple(
        (name, _describe(tensor)) for own in (module._parameters, module._buffers) for name, tensor in own.items()
    )
    children = tuple((name, None if child is None else structure(child)) for name, child in module._modules.items())
    return type(module), attributes, tensors, children


def modules_below(layer: nn.Module) -> list[nn.Module]:
    """Return a layer and all modules below it, in a third of the time of `modules()`, which also names them."""
    found = [layer]
    for module in found:  # the list grows meanwhile
        found += [child for child in module._modules.values() if child is not None]
    return found


def has_own_code(module: nn.Module) -> bool:
    """Return whether a module runs more than its class's forward: hooks, or a forward put on the instance."""
    attributes = module.__dict__
    return bool(attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]) or "forward" in attributes


def _describe(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _freeze(value: Any) -> Hashable:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_freeze, value))
    if isinstance(value, dict):
        return tuple((key, _freeze(item)) for key, item in value.items())
    if isinstance(value, set | frozenset):
        return frozenset(map(_freeze, value))
    return id(value)  # a module-level function is one object; anything else counts as different
