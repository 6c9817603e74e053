"""Make a layer of the recorded operations between two cuts."""

from __future__ import annotations

import linecache
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from hashlib import sha256
from importlib import import_module  # noqa: TID251 - what a pickle names
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from gpipe.tracing.batch import Numbering, OfBatch
from gpipe.tracing.inputs import Form, check_inputs, name_arguments
from gpipe.tracing.operations import Operations, find_examples


class Segment(nn.Module):
    """A layer: the operations between two cuts, as a Python function, and what they use.

    Unlike those of a GraphModule, its copies have all tensors in the same order, and save the same ones. Its own
    attributes have names that no model uses.

    Args:
        attributes: submodules, parameters and buffers, by their names in the graph.
        temporary: the names of the buffers that are not saved.
        constants: the names of those that the model's code made.
        graph: the operations, on one payload.
    """

    def __init__(
        self, attributes: dict[str, Any], temporary: Collection[str], constants: Collection[str], graph: fx.Graph
    ) -> None:
        super().__init__()
        self._gpipe_constants = constants
        for name, value in attributes.items():
            _hold(self, name, value, is_saved=name not in temporary)
        code = graph.python_code("self")
        imports = {name: value.__name__ for name, value in code.globals.items() if isinstance(value, ModuleType)}
        names = {name: value for name, value in code.globals.items() if name not in imports}
        self._gpipe_source = code.src, imports, names
        self._compile()

    def forward(self, payload: Any) -> Any:
        """Run the operations."""
        return self._gpipe_run(self, payload)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Segment:
        constants = {name: self.get_buffer(name) for name in self._gpipe_constants}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in constants.items():
            moved = self.get_buffer(name)
            if moved.dtype is not value.dtype:  # as to(torch.bfloat16) does, which leaves the model's code as it is
                self._buffers[name] = value.to(moved.device)
        return self

    def _compile(self) -> None:
        code, imports, others = self._gpipe_source
        names = {name: import_module(module) for name, module in imports.items()} | others
        place = f"<layer {sha256(code.encode()).hexdigest()[:16]}>"
        linecache.cache[place] = len(code), None, code.splitlines(keepends=True), place  # for tracebacks
        exec(compile(code, place, "exec"), names)  # noqa: S102 - fx writes it
        self._gpipe_run: Callable[[Segment, Any], Any] = names["forward"]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_gpipe_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._compile()


def _hold(module: nn.Module, name: str, value: Any, *, is_saved: bool) -> None:
    """Give a module a submodule, parameter or buffer under a name such as "blocks.0.weight"."""
    *parents, own = name.split(".")
    for parent in parents:
        if parent not in module._modules:
            module._modules[parent] = nn.Module()
        module = module.get_submodule(parent)
    if isinstance(value, nn.Module):
        module._modules[own] = value
    elif isinstance(value, nn.Parameter):
        module._parameters[own] = value
    elif own not in module._buffers:
        module._buffers[own] = value
        module._non_persistent_buffers_set.update(() if is_saved else (own,))


def build_segments(operations: Operations, cuts: Sequence[int], form: Form) -> Iterator[Segment]:
    """Yield a layer for the operations between each pair of cuts; the first one checks that inputs have the form."""
    for begin, end in pairwise([0, *cuts, len(operations.nodes)]):
        yield _build_segment(operations, begin, end, form)


def _build_segment(operations: Operations, begin: int, end: int, form: Form) -> Segment:
    graph = fx.Graph()
    payload = graph.placeholder("payload")
    made: dict[fx.Node, fx.Node] = {}
    entered = [operations.inputs] if begin == 0 else operations.find_alive(begin)
    if begin == 0:
        arguments = payload, form, name_arguments(operations.model)
        made[operations.inputs] = graph.call_function(check_inputs, arguments)
    elif len(entered) == 1:
        made[entered[0]] = payload
    else:
        for position, node in enumerate(entered):
            made[node] = graph.call_function(operator.getitem, (payload, position))
    copy = _Copy(operations, graph, made, entered)
    for node in operations.nodes[begin:end]:
        made[node] = copy.operation(node, *operations.arguments[node])
    if end == len(operations.nodes):
        (outputs,), _ = operations.arguments[operations.output]
        graph.output(copy.substitute(outputs))
    else:
        left = [made[node] if node in made else copy.attribute(node) for node in operations.find_alive(end)]
        graph.output(left[0] if len(left) == 1 else tuple(left))
    layer = Segment(copy.attributes, copy.temporary, copy.constants, graph)
    layer.training = operations.model.training  # submodules keep their own modes
    return layer


class _Copy:
    """Copies operations into the graph of one layer."""

    def __init__(
        self,
        operations: Operations,
        graph: fx.Graph,
        made: dict[fx.Node, fx.Node],
        entered: Sequence[fx.Node],
    ) -> None:
        self._operations, self._graph, self._made, self._entered = operations, graph, made, entered
        self._batch: fx.Node | None = None
        self._device: fx.Node | None = None
        self.attributes: dict[str, Any] = {}
        self.temporary: list[str] = []
        self.constants: list[str] = []

    def substitute(self, arguments: Any) -> Any:
        """Return arguments with their counterparts in this layer."""

        def substitute_leaf(leaf: Any) -> Any:
            if isinstance(leaf, OfBatch):
                return self._of_batch(leaf)
            if isinstance(leaf, fx.Node):
                return self._made[leaf] if leaf in self._made else self.attribute(leaf)
            return self._own_device() if isinstance(leaf, torch.device) else leaf

        return map_aggregate(arguments, substitute_leaf)

    def attribute(self, node: fx.Node) -> fx.Node:
        """Return a parameter, buffer or constant, or `training`, fetched in this layer."""
        name = str(node.target).removeprefix("model.")
        constant = self._operations.constants.get(name)
        if isinstance(constant, Numbering):
            self._made[node] = self._number_examples(constant)
            return self._made[node]
        if constant is not None:
            self.attributes[name] = constant.tensor
            self.temporary.append(name)
            self.constants.append(name)
        elif name != "training":
            self.attributes[name], is_temporary = self._operations.attribute(name)
            if is_temporary:
                self.temporary.append(name)
        found = self._graph.get_attr(name)
        if constant is not None and constant.shape is not None:
            found = self._graph.call_method("expand", (found, self.substitute(constant.shape)))
            found = self._graph.call_method("contiguous", (found,)) if constant.is_contiguous else found
        self._made[node] = found
        return found

    def _number_examples(self, constant: Numbering) -> fx.Node:
        options: dict[str, Any] = {"dtype": constant.dtype, "device": self._own_device()}
        numbers = self._graph.call_function(torch.arange, (self._of_batch(OfBatch(1, 0)),), options)
        return self._graph.call_method("reshape", (numbers, self.substitute(constant.shape)))

    def operation(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        """Return the same operation in this layer."""
        target = node.target
        if node.op == "call_module":
            target = str(node.target).removeprefix("model.")
            self.attributes[target], _ = self._operations.attribute(target)
        return self._graph.create_node(node.op, target, self.substitute(args), self.substitute(kwargs))

    def _tensors(self) -> Iterator[tuple[fx.Node, list[Tensor]]]:
        """Yield the tensors that this layer receives, and their values for each number of examples."""
        for node in self._entered:
            yield from self._tensors_of(self._made[node], [values[node] for values in self._operations.values])

    def _tensors_of(self, part: fx.Node, values: list[Any]) -> Iterator[tuple[fx.Node, list[Tensor]]]:
        if isinstance(values[0], Tensor):
            yield part, values
        elif values[0] is not None:
            for key in values[0] if isinstance(values[0], dict) else range(len(values[0])):
                inner = self._graph.call_function(operator.getitem, (part, key))
                yield from self._tensors_of(inner, [value[key] for value in values])

    def _of_batch(self, number: OfBatch) -> Any:
        if self._batch is None:
            self._batch = self._find_batch()
        scaled = self._batch
        if number.factor != 1:
            scaled = self._graph.call_function(operator.mul, (scaled, number.factor))
        return self._graph.call_function(operator.add, (scaled, number.offset)) if number.offset else scaled

    def _find_batch(self) -> fx.Node:
        rows: list[tuple[int, int, fx.Node]] = []
        for tensor, values in self._tensors():
            if (found := find_examples(values)) is not None:
                rows.append((found[1], found[0], tensor))
            if found is not None and found[1] == 1:
                break
        factor, dimension, tensor = min(rows, key=operator.itemgetter(0))
        size = self._graph.call_method("size", (tensor, dimension))
        return size if factor == 1 else self._graph.call_function(operator.floordiv, (size, factor))

    def _own_device(self) -> fx.Node:
        if self._device is None:
            tensor, _ = next(self._tensors())
            self._device = self._graph.call_function(getattr, (tensor, "device"))
        return self._device
