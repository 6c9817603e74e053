"""What code keeps in a module while it runs: buffers and parameters that it replaces, and attributes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import nn

from gpipe.tracing.recording import find_containers, items_of
from gpipe.tracing.traced_tensor import IN_PLACE, TracedTensor


def has_others(module: nn.Module) -> bool:
    """Return whether code has replaced a module's parameters by other tensors, or put traced ones anywhere."""
    is_parameter = (own is None or isinstance(own, nn.Parameter) for own in module._parameters.values())
    values = chain(vars(module).values(), module._buffers.values())
    return not all(is_parameter) or any(type(own) is TracedTensor for own in values)


def own_tensors(module: nn.Module) -> dict[str, Any]:
    """Return a module's buffers and parameters by name."""
    return {**module._buffers, **module._parameters}


def find_replaced(module: nn.Module, before: Mapping[str, Any]) -> str | None:
    """Return the name of a buffer or parameter that code has replaced or registered; None if there is none."""
    for name, own in before.items():
        if _is_changed_in_place(own_tensors(module).get(name), name):
            module._buffers[name] = own
    now = own_tensors(module)
    return next((name for name in {**before, **now} if now.get(name) is not before.get(name)), None)


def leaves_of(module: nn.Module, name: str) -> list[Any]:
    """Return what is in a buffer or an attribute, such as a list."""
    # Not `get`: the buffers of a TorchScript module are not a dict.
    found = module._buffers[name] if name in module._buffers else module.__dict__.get(name)
    return [found, *chain.from_iterable(map(items_of, find_containers([found])))]


def _is_changed_in_place(value: Any, name: str) -> bool:
    """Return whether a buffer was assigned what `self.buffer += 1` gives: itself."""
    node: Any = value.node if isinstance(value, TracedTensor) else None
    while node is not None and node.target in IN_PLACE:
        node = node.args[0]
    return node is not None and node.op == "get_attr" and node.target.rpartition(".")[2] == name
