"""Cut a recorded graph where few tensors are alive, into layers that pass these on."""

from __future__ import annotations

import linecache
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from hashlib import sha256
from importlib import import_module  # noqa: TID251 - what a pickle names
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn

from gpipe._compat.torch_description import tree_leaves
from gpipe.pipeline._compat import AnyBatchNorm, is_compiled
from gpipe.tracing.batch import (
    BATCHES,
    Constant,
    FreeArguments,
    Numbering,
    OfBatch,
    are_equal,
    are_sizes_read,
    find_of_batch,
)
from gpipe.tracing.errors import TracingError, explain
from gpipe.tracing.inputs import Form, check_inputs, find_form, name_arguments
from gpipe.tracing.tracer import Tracer, free_name, storage_of, trace

# A layer costs about ten microseconds, so none gets less than 1/256 of the model's FLOPs, and a piece of less than 1/64
# is not cut. A cut that several tensors cross is only worth it in a piece of more than 1/16.
_LEAST, _SMALL, _LARGE = 1 / 256, 1 / 64, 1 / 16

_FAR = 256
"""The least size to replace one of an example's, so that strides and windows do not hide the change."""


class TracedLayers(nn.Sequential):
    """A model as a sequence of layers. They hold the model's own parameters, under the model's own names.

    Attributes:
        names: the name here of each parameter and buffer, by its name in the model: "norm.weight" -> "23.norm.weight".
        model_names: the reverse, with an entry for every layer that has a tensor.
        leaves: names and types of submodules that are one operation each: those that were named, and those found.
    """

    def __init__(self, segments: Sequence[nn.Module], model: nn.Module, leaves: Collection[Any]) -> None:
        super().__init__(*segments)
        state = {name: part for name, part in model.state_dict(keep_vars=True).items() if isinstance(part, Tensor)}
        own = [(place, id(tensor)) for place, tensor in _named_tensors(self)]
        unused = {id(tensor): tensor for tensor in state.values()}
        for _, used in own:
            unused.pop(used, None)
        for number, (key, tensor) in enumerate(unused.items()):
            # The forward does not use it, but an export needs it: the last layer keeps it.
            unused_name = free_name(segments[-1], f"unused_{number}")
            segments[-1].register_buffer(unused_name, tensor.detach())
            own.append((f"{len(segments) - 1}.{unused_name}", key))
        first_place = {key: place for place, key in reversed(own)}
        first_name = {id(tensor): name for name, tensor in reversed(list(state.items()))}
        self.names = {name: first_place[id(tensor)] for name, tensor in state.items()}
        self.model_names = {place: first_name[key] for place, key in own if key in first_name}
        self.leaves = sorted({leaf if isinstance(leaf, str) else leaf.__name__ for leaf in leaves})

    def model_state_dict(self, only: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the state dict of the model that was cut, with the values of the layers.

        Args:
            only: the indices, as strings, of the layers whose entries to return; None for all. With one process per
                stage, pass `pipeline.layers`: the entries of all processes together are the state dict.
        """
        own = dict(_named_tensors(self))
        wanted = [*self._modules] if only is None else only
        return {name: own[at].detach() for name, at in self.names.items() if at.partition(".")[0] in wanted}

    @torch.no_grad()
    def load_model_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state dict of the model that was cut, such as pre-trained weights.

        Raises:
            ValueError: a name is missing or unknown, or a tensor has another shape.
        """
        own = dict(_named_tensors(self))
        targets = {name: own[place] for name, place in self.names.items()}
        if different := sorted(targets.keys() ^ state.keys()):
            where = "missing" if different[0] in targets else "unknown to the model"
            raise ValueError(
                f"{different[0]} is {where} (names that differ: {len(different)}); give this model's state dict"
            )
        for name, tensor in targets.items():
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"{name} has the shape {tuple(state[name].shape)}, but {tuple(tensor.shape)} in the model; give "
                    "this model's state dict"
                )
        for place, name in self.model_names.items():  # a pipeline copies what several layers share
            own[place].copy_(state[name])

    def __getitem__(self, index: Any) -> Any:
        """Return a layer; or several, in a plain sequence."""
        return nn.Sequential(*list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)


def as_layers(model: nn.Module, example: Any, *, leaves: Collection[str | type[nn.Module]] = ()) -> TracedLayers:
    """Return any module as a sequence of layers for `gpipe.Pipeline`, cut wherever few tensors are alive.

    The layers compute the same bits as the model: they run its own operations and submodules, in its order, on its own
    parameters. They take the same inputs. Numbers that depend on the number of examples are computed from the tensors
    that travel, so micro-batches may have any size. Other input sizes that the model's code reads must be those of the
    example. Outputs are nested like the model's, in plain tuples, lists and dicts. A dataclass becomes a dict of the
    entries that are not None; a single such entry is returned by itself.

    Args:
        model: may be in training or evaluation mode. To change the mode later, call `train` or `eval` of the layers:
            those of the model do not reach dropout in its own code.
        example: its input: a tensor, a tuple of arguments, or a dict of keyword arguments. The examples are along the
            first dimension of each tensor, unless it is marked with `gpipe.split_along` or `gpipe.replicated`. Only
            shapes and types are read, and nothing is computed.
        leaves: names and types of submodules to treat as one operation each. Those whose code cannot be recorded, or
            decides by `self.training`, are found automatically.

    Raises:
        TracingError: the model's own forward cannot be recorded, such as one that decides by values that are unknown
            before it runs; the message names the file and the line. A subclass of ValueError.
        TypeError: `leaves` is not a collection of names and types.
        ValueError: the model has no submodule of that name or type.
    """
    if is_compiled(model):
        raise TracingError(
            f"{type(model).__name__} is compiled by torch.compile, which its layers would not be; give the uncompiled "
            "model, and call pipeline.compile()"
        )
    if model._backward_hooks or model._backward_pre_hooks:
        raise TracingError(
            f"{type(model).__name__} has backward hooks, which layers would not call; remove them, or make the model a "
            "submodule of another one"
        )
    leaves = leaves if isinstance(leaves, str | type) else tuple(leaves)
    _check_leaves(leaves, model)
    modes = {module: module.training for module in model.modules()}
    odd = {module for module, mode in modes.items() if mode != model.training}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]  # torch really computes with small ones
    model.train()
    try:
        whole: set[Any] = set(leaves)
        while True:
            traces = []
            for batch in BATCHES:
                traces.append(trace(model, example, whole, batch, odd=odd))
                whole = traces[-1][2]
            if whole == traces[0][2]:
                break
        graphs, tracers = [graph for graph, _, _ in traces], [tracer for _, tracer, _ in traces]
        arguments, constants = find_of_batch(graphs, tracers)
        _refuse_decision(model, example, whole, graphs[0], tracers[0], odd)
        form = find_form(example, 0, _find_read(model, example, whole, graphs[0], tracers, odd))
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    values = [
        dict(zip(graphs[0].nodes, map(tracer.values.get, graph.nodes), strict=True)) for graph, tracer, _ in traces
    ]
    segments = _Segments(model, graphs[0], arguments, constants, values, form)
    cuts = _choose_cuts(segments, tracers[0].flops, tracers[0].changed)
    layers = TracedLayers(list(segments.build(cuts)), model, traces[0][2])
    layers.training = model.training
    return layers


def _check_leaves(leaves: Any, model: nn.Module) -> None:
    """Refuse leaves that are not submodules of the model."""
    if isinstance(leaves, str | type):
        raise TypeError(f"leaves is {leaves!r}; give a list of names and types, such as [{_quote(leaves)}]")
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    types = set(map(type, model.modules()))
    for leaf in leaves:
        if not isinstance(leaf, str | type):
            raise TypeError(f"leaves has an entry of type {type(leaf).__name__}; give names and types of submodules")
        if leaf not in (names if isinstance(leaf, str) else types):
            known = sorted(names - {""}) if isinstance(leaf, str) else sorted({kind.__name__ for kind in types})
            near = get_close_matches(leaf if isinstance(leaf, str) else leaf.__name__, known, n=1)
            meant = f", such as {near[0]}" if near else ""
            what = "has that name" if isinstance(leaf, str) else "is of that type"
            raise ValueError(
                f"leaves has {_quote(leaf)}, but no submodule of {type(model).__name__} {what}; give names as "
                f"model.named_modules() has them, or types of submodules{meant}"
            )


def _quote(leaf: str | type) -> str:
    return repr(leaf) if isinstance(leaf, str) else leaf.__name__


def _refuse_decision(
    model: nn.Module,
    example: Any,
    whole: Collection[Any],
    graph: fx.Graph,
    tracer: Tracer,
    odd: Collection[nn.Module],
) -> None:
    """Refuse a model whose own code decides by `training`, unless it runs the same operations in both modes."""
    if tracer.decision is None:
        return
    other, other_tracer, _ = trace(model, example, whole, BATCHES[0], training=False, odd=odd)
    if not are_equal(graph, other, (tracer, other_tracer)):
        raise explain(model, tracer.decision, "decides by self.training")


def _find_read(
    model: nn.Module,
    example: Any,
    whole: Collection[Any],
    graph: fx.Graph,
    tracers: Sequence[Tracer],
    odd: Collection[nn.Module],
) -> set[int]:
    """Return the sizes of an example that the model's code reads: replacing one changes what is recorded."""

    def is_read(size: int) -> bool:
        other = max(2, -(-_FAR // size)) * size
        try:
            found = trace(model, example, whole, BATCHES[0], odd=odd, sizes={size: other})
        except TracingError:
            return True
        is_same = found[2] == whole and found[1].sizes_read() == tracers[0].sizes_read()
        return not (is_same and are_equal(graph, found[0], (tracers[0], found[1])))

    sizes = {size for size in tree_leaves(find_form(example, 0)) if size} if are_sizes_read(tracers) else ()
    return set(filter(is_read, sizes))


class Segment(nn.Module):
    """A layer: the operations between two cuts, as a Python function, and what they use.

    Unlike those of a GraphModule, its copies have all tensors in the same order, and save the same ones.

    Args:
        attributes: submodules, parameters and buffers, by their names in the graph.
        temporary: the names of the buffers that are not saved.
        graph: the operations, on one payload.
    """

    def __init__(self, attributes: dict[str, Any], temporary: Collection[str], graph: fx.Graph) -> None:
        super().__init__()
        made = fx.GraphModule(attributes, graph)
        for name in temporary:
            parent, _, own = name.rpartition(".")
            made.get_submodule(parent)._non_persistent_buffers_set.add(own)
        self.__dict__.update({name: made.__dict__[name] for name in _HELD})
        code = graph.python_code("self")
        self._code = code.src
        self._imports = {name: value.__name__ for name, value in code.globals.items() if isinstance(value, ModuleType)}
        self._names = {name: value for name, value in code.globals.items() if name not in self._imports}
        self._compile()

    def forward(self, payload: Any) -> Any:
        """Run the operations."""
        return self._run(self, payload)

    def _compile(self) -> None:
        names = {name: import_module(module) for name, module in self._imports.items()} | self._names
        place = f"<layer {sha256(self._code.encode()).hexdigest()[:16]}>"
        linecache.cache[place] = len(self._code), None, self._code.splitlines(keepends=True), place  # for tracebacks
        exec(compile(self._code, place, "exec"), names)  # noqa: S102 - fx writes it
        self._run: Callable[[Segment, Any], Any] = names["forward"]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._compile()


_HELD = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class _Segments:
    """The operations of a model in order, and what is alive between them."""

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        arguments: Mapping[fx.Node, FreeArguments],
        constants: Mapping[str, Constant | Numbering],
        values: Sequence[Mapping[fx.Node, Any]],
        form: Form,
    ) -> None:
        self._form = form
        self._model, self._arguments, self._constants, self._values = model, arguments, constants, values
        self.operations = [node for node in graph.nodes if node.op.startswith("call_")]
        (self._inputs,) = (node for node in graph.nodes if node.op == "placeholder")
        (self._output,) = (node for node in graph.nodes if node.op == "output")
        last_use: dict[fx.Node, int] = {}
        for position, node in enumerate([*self.operations, self._output]):
            for used in node.all_input_nodes:
                last_use[used] = position
        self._last_use = last_use

    def value(self, node: fx.Node) -> Any:
        """Return the value of a node, without data."""
        return self._values[0][node]

    def batch_norms(self, node: fx.Node) -> list[nn.Module]:
        """Return the batch norms that an operation runs."""
        if node.op != "call_module":
            return []
        module = self._model.get_submodule(str(node.target).removeprefix("model."))
        return [child for child in module.modules() if isinstance(child, AnyBatchNorm)]

    def find_alive(self, cut: int) -> list[fx.Node]:
        """Return the nodes before a cut that operations after it need."""
        made = [self._inputs, *self.operations[:cut]]
        return [node for node in made if self._last_use.get(node, -1) >= cut]

    def needs_batch_size(self, node: fx.Node) -> bool:
        """Return whether an operation needs the number of examples."""

        def is_number(leaf: Any) -> bool:
            return isinstance(leaf, OfBatch)

        constants = (self.constant(str(used.target).removeprefix("model.")) for used in node.all_input_nodes)
        shapes = [constant.shape for constant in constants if constant is not None]
        return any(map(is_number, tree_leaves((*self._arguments[node], shapes), is_leaf=is_number)))

    def has_examples(self, node: fx.Node) -> bool:
        """Return whether a tensor has the examples in a dimension."""
        return find_examples([values[node] for values in self._values]) is not None

    def build(self, cuts: Sequence[int]) -> Iterator[nn.Module]:
        """Yield a layer for the operations between each pair of cuts."""
        ends = [0, *cuts, len(self.operations)]
        for begin, end in pairwise(ends):
            yield self._layer(begin, end)

    def _layer(self, begin: int, end: int) -> nn.Module:
        graph = fx.Graph()
        payload = graph.placeholder("payload")
        made: dict[fx.Node, fx.Node] = {}
        entered = [self._inputs] if begin == 0 else self.find_alive(begin)
        if begin == 0:
            made[self._inputs] = graph.call_function(check_inputs, (payload, self._form, name_arguments(self._model)))
        elif len(entered) == 1:
            made[entered[0]] = payload
        else:
            for position, node in enumerate(entered):
                made[node] = graph.call_function(operator.getitem, (payload, position))
        copy = _Copy(self, graph, made, entered, self._values)
        for node in self.operations[begin:end]:
            made[node] = copy.operation(node, *self._arguments[node])
        if end == len(self.operations):
            graph.output(copy.substitute(self._arguments[self._output].args[0]))
        else:
            left = [made[node] if node in made else copy.attribute(node) for node in self.find_alive(end)]
            graph.output(left[0] if len(left) == 1 else tuple(left))
        layer = Segment(copy.attributes, copy.temporary, graph)
        layer.training = self._model.training  # submodules keep their own modes
        return layer

    def constant(self, name: str) -> Constant | Numbering | None:
        """Return a tensor that the code made from no input."""
        return self._constants.get(name)

    def attribute(self, name: str) -> tuple[Any, bool]:
        """Return a submodule, parameter or buffer of the model, and whether it is a buffer that is not saved."""
        parent, _, own = name.rpartition(".")
        module = self._model.get_submodule(parent)
        return getattr(module, own), own in module._non_persistent_buffers_set


class _Copy:
    """Copies operations into the graph of one layer."""

    def __init__(
        self,
        segments: _Segments,
        graph: fx.Graph,
        made: dict[fx.Node, fx.Node],
        entered: Sequence[fx.Node],
        values: Sequence[Mapping[fx.Node, Any]],
    ) -> None:
        self._segments, self._graph, self._made = segments, graph, made
        self._entered, self._values = entered, values
        self._batch: fx.Node | None = None
        self._device: fx.Node | None = None
        self.attributes: dict[str, Any] = {}
        self.temporary: list[str] = []

    def substitute(self, arguments: Any) -> Any:
        """Return arguments with their counterparts in this layer."""
        if isinstance(arguments, OfBatch):
            return self._of_batch(arguments)
        if isinstance(arguments, fx.Node):
            return self._made[arguments] if arguments in self._made else self.attribute(arguments)
        if isinstance(arguments, slice):
            return slice(*(self.substitute(part) for part in (arguments.start, arguments.stop, arguments.step)))
        if isinstance(arguments, tuple | list):
            return (
                type(arguments)(self.substitute(part) for part in arguments)
                if type(arguments) in (tuple, list)
                else arguments
            )
        if isinstance(arguments, dict):
            return {key: self.substitute(part) for key, part in arguments.items()}
        if isinstance(arguments, torch.device):
            return self._own_device()
        return arguments

    def attribute(self, node: fx.Node) -> fx.Node:
        """Return a parameter, buffer or constant, or `training`, fetched in this layer."""
        name = str(node.target).removeprefix("model.")
        constant = self._segments.constant(name)
        if isinstance(constant, Numbering):
            self._made[node] = self._number_examples(constant)
            return self._made[node]
        if name == "training":
            self.attributes[name] = True
        elif constant is not None:
            self.attributes[name] = constant.tensor
            self.temporary.append(name)
        else:
            self.attributes[name], is_temporary = self._segments.attribute(name)
            if is_temporary:
                self.temporary.append(name)
        found = self._graph.get_attr(name)
        if constant is not None and constant.shape is not None:
            found = self._graph.call_method("expand", (found, self._sizes(constant.shape)))
        self._made[node] = found
        return found

    def _number_examples(self, constant: Numbering) -> fx.Node:
        options: dict[str, Any] = {"dtype": constant.dtype, "device": self._own_device()}
        numbers = self._graph.call_function(torch.arange, (self._of_batch(OfBatch(1, 0)),), options)
        return self._graph.call_method("reshape", (numbers, self._sizes(constant.shape)))

    def _sizes(self, shape: tuple[int | OfBatch, ...]) -> tuple[Any, ...]:
        return tuple(self._of_batch(size) if isinstance(size, OfBatch) else size for size in shape)

    def operation(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        """Return the same operation in this layer."""
        target = node.target
        if node.op == "call_module":
            target = str(node.target).removeprefix("model.")
            self.attributes[target], _ = self._segments.attribute(target)
        return self._graph.create_node(node.op, target, self.substitute(args), self.substitute(kwargs))

    def _tensors(self) -> Iterator[tuple[fx.Node, list[Tensor]]]:
        """Yield the tensors that this layer receives, and their values for each number of examples."""
        for node in self._entered:
            leaves = [tree_leaves(values[node]) for values in self._values]
            if isinstance(self._values[0][node], Tensor):
                yield self._made[node], [row[0] for row in leaves]
                continue
            nest = self._values[0][node]
            for key in nest if isinstance(nest, dict) else range(len(nest)):
                if isinstance(nest[key], Tensor):
                    part = self._graph.call_function(operator.getitem, (self._made[node], key))
                    yield part, [values[node][key] for values in self._values]

    def _of_batch(self, number: OfBatch) -> Any:
        if self._batch is None:
            self._batch = self._find_batch()
        scaled = self._batch
        if number.factor != 1:
            scaled = self._graph.call_function(operator.mul, (scaled, number.factor))
        return self._graph.call_function(operator.add, (scaled, number.offset)) if number.offset else scaled

    def _find_batch(self) -> fx.Node:
        for tensor, values in self._tensors():
            if (found := find_examples(values)) is not None:
                size = self._graph.call_method("size", (tensor, found[0]))
                return size if found[1] == 1 else self._graph.call_function(operator.floordiv, (size, found[1]))
        raise TracingError(
            "no tensor of the example has the examples along a dimension; give its tensors in one flat nest"
        )

    def _own_device(self) -> fx.Node:
        if self._device is None:
            tensor, _ = next(self._tensors())
            self._device = self._graph.call_function(getattr, (tensor, "device"))
        return self._device


def find_examples(values: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return a tensor's dimension with the examples, and the number of its entries per example; None if there is none.

    values: the tensor for each number of examples.
    """
    for dimension, sizes in enumerate(zip(*(value.shape for value in values), strict=True)):
        factor, rest = divmod(sizes[0], BATCHES[0])
        if rest == 0 and factor and all(size == factor * n for size, n in zip(sizes, BATCHES, strict=True)):
            return dimension, factor
    return None


def _choose_cuts(segments: _Segments, flops: Mapping[fx.Node, int], changed: Mapping[fx.Node, set[int]]) -> list[int]:
    """Return the positions among the operations at which layers begin, except the first.

    A piece is cut in two where the fewest bytes are alive; among places with about as few, where the fewest tensors
    are, then nearest the middle of its FLOPs. No cut lies between two uses of a batch norm: its moving averages belong
    to one layer.
    """
    operations = segments.operations
    uses: dict[nn.Module, list[int]] = {}
    for position, node in enumerate(operations):
        for norm in segments.batch_norms(node):
            uses.setdefault(norm, []).append(position)
    together = {cut for positions in uses.values() for cut in range(positions[0] + 1, positions[-1] + 1)}
    work = [0, *accumulate(flops.get(node, 0) + 1 for node in operations)]
    total = work[-1]
    crossing: dict[int, tuple[int, int]] = {}  # cut -> bytes, number of tensors
    later: set[int] = set()
    is_size_needed = False  # whether an operation after the cut needs the number of examples
    for cut in range(len(operations) - 1, 0, -1):
        later |= changed.get(operations[cut], set())
        is_size_needed = is_size_needed or segments.needs_batch_size(operations[cut])
        alive = segments.find_alive(cut)
        tensors = [segments.value(node) for node in alive]
        travels = all(isinstance(tensor, Tensor) and storage_of(tensor) not in later for tensor in tensors)
        if travels and cut not in together and (not is_size_needed or any(map(segments.has_examples, alive))):
            crossing[cut] = sum(tensor.nbytes for tensor in tensors), len(tensors)
    cuts: list[int] = []
    pieces = [(0, len(operations))]
    while pieces:
        begin, end = pieces.pop()
        own = work[end] - work[begin]
        if own <= _SMALL * total:
            continue
        possible = [
            cut
            for cut in range(begin + 1, end)
            if cut in crossing
            and min(work[cut] - work[begin], work[end] - work[cut]) >= _LEAST * total
            and (crossing[cut][1] == 1 or own > _LARGE * total)
        ]
        if not possible:
            continue
        least = min(crossing[cut][0] for cut in possible)
        near = [cut for cut in possible if crossing[cut][0] <= 1.25 * least]
        best = min(near, key=lambda cut: (crossing[cut][1], abs(work[cut] - (work[begin] + work[end]) / 2)))
        cuts.append(best)
        pieces += [(begin, best), (best, end)]
    return sorted(cuts)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
