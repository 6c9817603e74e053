"""What code keeps in a module while it runs: buffers and parameters that it replaces, attributes and their contents."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe.tracing.errors import Undecided
from gpipe.tracing.traced_tensor import IN_PLACE, TracedTensor

_CONTAINERS = dict, list, tuple, set, deque


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


def items_of(container: Any) -> Collection[Any]:
    """Return what is in a container."""
    return container.values() if isinstance(container, dict) else container


def find_containers(values: Iterable[Any]) -> Collection[Any]:
    """Return the dicts, lists, tuples, sets and deques among the values, including nested ones and those of objects."""
    found: dict[int, Any] = {}
    left = [vars(value) if _is_object(value) else value for value in values]
    while left:
        value = left.pop()
        if isinstance(value, _CONTAINERS) and id(value) not in found:
            found[id(value)] = value
            left += items_of(value)
    return found.values()


def _is_object(value: Any) -> bool:
    """Return whether a value is an object of the model's own, such as one that collects losses."""
    kind = type(value)
    has_attributes = hasattr(value, "__dict__") and not isinstance(value, (ModuleType, Tensor, *_CONTAINERS))
    return has_attributes and not callable(value) and not kind.__module__.startswith("torch")


def _snapshot(container: Any) -> list[Any]:
    return [*chain.from_iterable(container.items())] if isinstance(container, dict) else [*container]


def _restore(container: Any, before: list[Any]) -> None:
    """Put back what was in a container, but only if it has changed: some containers cannot be changed."""
    now = _snapshot(container)
    if len(now) == len(before) and all(map(operator.is_, now, before)):
        return
    container.clear()
    if isinstance(container, dict):
        container.update(zip(before[::2], before[1::2], strict=True))
    else:
        container.extend(before) if isinstance(container, list | deque) else container.update(before)


@contextmanager
def undo_changes(model: nn.Module) -> Iterator[None]:
    """Undo what a model's code stores in attributes and tensors, such as a table for later calls; refuse new hooks."""
    kept = [(module, dict(module.__dict__)) for module in model.modules()]
    values = {id(value): value for _, attributes in kept for value in attributes.values()}.values()
    entries = [(value, _snapshot(value)) for value in find_containers(values)]
    tensors = [(value, value.clone()) for value in values if type(value) is Tensor]
    dense = (own for own in chain(model.parameters(), model.buffers()) if own.layout is torch.strided)
    memory = [(own, own.data) for own in dense if not is_lazy(own)]
    try:
        yield
    finally:
        hooks = [value for _, attributes in kept for name, value in attributes.items() if name.endswith("_hooks")]
        sizes = list(map(len, hooks))
        for module, attributes in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for value, before in entries:
            _restore(value, before)
        for tensor, data in memory:
            if tensor.device != data.device or tensor.data_ptr() != data.data_ptr():
                tensor.data = data
        with torch.no_grad():
            for tensor, number in tensors:
                tensor.copy_(number)
    if sizes != list(map(len, hooks)):
        raise Undecided("registers hooks while it runs, which its layers would not have; run it once first")
