"""A model as a sequence of layers, made from its recorded operations."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gpipe.pipeline._compat import is_compiled
from gpipe.tracing.batch import find_of_batch
from gpipe.tracing.errors import TracingError
from gpipe.tracing.inputs import find_form
from gpipe.tracing.operations import Operations, choose_cuts
from gpipe.tracing.segments import build_segments
from gpipe.tracing.tracer import free_name
from gpipe.tracing.traces import Traces


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
        state = {name: part for name, part in state.items() if isinstance(part, Tensor)}
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
        TypeError: `model` is not a module, or `leaves` is not a collection of names and types.
        ValueError: the model has no submodule of that name or type.
    """
    if not isinstance(model, nn.Module):
        found = f"the class {model.__name__}" if isinstance(model, type) else f"of type {type(model).__name__}"
        raise TypeError(f"model is {found}; give an instance of an nn.Module")
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
    for module in modes:
        module.training = True  # not `model.train()`, which may do more, such as take merged weights apart
    try:
        traces = Traces(model, example, leaves, odd)
        arguments, constants = find_of_batch(traces.tracers)
        traces.refuse_decision()
        traces.refuse_sizes()
        form = find_form(example, 0, traces.find_read())
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    tracer = traces.tracers[0]
    operations = Operations(model, tracer.graph, arguments, constants, traces.values(), tracer.moving)
    cuts = choose_cuts(operations, tracer.flops, tracer.changed)
    if any(operations.counts_rows(begin, end) for begin, end in pairwise([*cuts, len(operations.nodes)])):
        form = find_form(example, 0)  # with other sizes, such as the length of a text, it would be another multiple
    layers = TracedLayers(list(build_segments(operations, cuts, form)), model, traces.whole)
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


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
