"""Record the operations of a model's forward while it runs on tensors without data."""

from __future__ import annotations

import copy
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from gpipe._compat.fake_tensors import QuickFakeTensorMode, is_fake
from gpipe._compat.flop_counts import FlopCounter
from gpipe._compat.torch_description import tree_leaves, tree_map, unset_fake_temporarily, without_compiling
from gpipe.pipeline._compat import is_compiled
from gpipe.pipeline.layers.generators import HostGenerators, preserved_generators
from gpipe.pipeline.microbatch import Examples
from gpipe.pipeline.nothing import NOTHING
from gpipe.tracing.errors import OF_DECISIONS, TracingError, Undecided, Whole, explain, is_of_model, is_ours
from gpipe.tracing.kept_state import find_replaced, has_others, leaves_of, own_tensors, undo_changes
from gpipe.tracing.model_call import ModelCall, open_nest
from gpipe.tracing.recording import TracedMode, find_line, patch_torch, read_settings
from gpipe.tracing.traced_shape import TracedShape
from gpipe.tracing.traced_tensor import TracedTensor

_CONTAINERS = nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder

_OF_FORM = ("dim", "ndimension", "get_device", "element_size")  # numbers that are not sizes
_TRANSFORMERS = nn.Transformer.forward.__code__.co_filename


class Tracer(fx.Tracer):
    """Records the operations of one call.

    Args:
        whole: names and types of submodules that are one operation each. Those of torch.nn are, too.
        batch: the number of examples.
        training: the mode that the model's own code sees.
        odd: submodules in another mode than the model; they are one operation each if they read it.
        sizes: replacements for some of the example's sizes.
        number: what tensors are filled with for a submodule that runs for real; False instead of 2.

    Attributes:
        graph: the operations, once they are recorded; its placeholder is the nest of inputs.
        values: of each node, without data.
        flops: of each node.
        changed: the storages that each node changes in place.
        moving: the identities of the model's buffers that its code changes.
        constants: tensors that the code made from no input, by the name of their node's target.
        sizes: the sizes of tensors that the code read, in order.
        places: where in the model's code each node is made, except for torch's own models.
        decision: where the model's own code first decided by the mode; None if it did not.
        has_run: whether a submodule has run for real.
    """

    def __init__(
        self,
        whole: set[Any],
        batch: int,
        *,
        training: bool = True,
        odd: Collection[nn.Module] = (),
        sizes: Mapping[int, int] | None = None,
        number: int = 1,
    ) -> None:
        super().__init__()
        self.proxy_buffer_attributes = True
        self.whole, self._batch, self._training, self._odd, self._others = whole, batch, training, odd, sizes or {}
        self.decision: traceback.StackSummary | None = None
        self.has_run, self._number = False, number
        self._fake = QuickFakeTensorMode(allow_non_fake_inputs=True)
        self.values: dict[fx.Node, Any] = {}
        self.flops: dict[fx.Node, int] = {}
        self.changed: dict[fx.Node, set[int]] = {}
        self.moving: set[int] = set()
        self.constants: dict[str, Tensor] = {}
        self.sizes: list[int | TracedShape] = []
        self.places: dict[fx.Node, traceback.FrameSummary] = {}
        self._constants: dict[tuple[int, int], fx.Node] = {}  # by the tensor's identity and version
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # tensors that the code made, and what stands for them
        self._recorded: set[nn.Module] = set()
        self._weights: set[int] = set()  # the storages of parameters
        self._raised: Exception | None = None  # the first in the model's code, which may have caught it
        self._trained: set[fx.Node] = set()  # nodes whose values have a gradient in training
        self._is_running = False  # whether an operation runs, whose own code is not recorded

    def record(self, model: nn.Module, example: Any) -> None:
        """Call a model with an example, and record the operations."""
        devices = {parameter.device for parameter in model.parameters()}
        dense = (own for own in chain(model.parameters(), model.buffers()) if own.layout is torch.strided)
        self._own_memory = {storage_of(own) for own in dense if not is_lazy(own)}
        self._device = devices.pop() if len(devices) == 1 else None  # where a pipeline moves the inputs
        with self._fake:
            self._inputs = tree_map(self._describe, example)
        self._current: list[str] = []
        self._settings = read_settings()
        with undo_changes(model), patch_torch(self), torch.enable_grad(), preserved_generators([]):
            buffers = [(m, name, own) for m in model.modules() for name, own in m._buffers.items() if own is not None]
            seen = [(own, own._version) for _, _, real in buffers for own in (real, self._fake.from_tensor(real))]
            self.trace(ModelCall(model, example))
            for place, (m, name, own) in enumerate(buffers):
                versions = seen[2 * place : 2 * place + 2]
                if own_tensors(m).get(name) is not own or any(one._version != version for one, version in versions):
                    self.moving.add(id(own))

    def _describe(self, leaf: Any) -> Tensor | None:
        """Return a tensor of the example with this tracer's number of examples, without data."""
        if leaf is None:
            return None
        if not isinstance(leaf, Tensor | Examples):
            what = (
                repr(leaf) if isinstance(leaf, bool | int | float | str) else f"a value of type {type(leaf).__name__}"
            )
            raise TracingError(
                f"the example has {what}, and layers take only tensors and None; convert arrays with torch.as_tensor, "
                "and make numbers and names part of the model"
            )
        given = leaf if isinstance(leaf, Examples) else Examples(leaf, 0)
        shape = [self._others.get(size, size) for size in given.tensor.shape]
        if given.dimension is not None and given.dimension >= len(shape):
            raise TracingError(
                f"the example has a tensor of shape {(*shape,)}, without a dimension {given.dimension} for the "
                "examples; mark it with gpipe.replicated if it belongs to no example"
            )
        if given.dimension is not None:
            shape[given.dimension] = self._batch
        return torch.empty(shape, dtype=given.tensor.dtype, device=self._device or given.tensor.device)

    @property
    def is_recording(self) -> bool:
        """Whether the code that runs is recorded."""
        return bool(self._current) and not self._is_running

    def _is_registered(self, module: nn.Module) -> bool:
        """Return whether a module is in the model; others are made by its code, such as a loss, or held in a list."""
        return module in (self.submodule_paths or {})

    def read_training(self, module: nn.Module) -> Any:
        """Return what stands for the mode of a module when the model's code asks for it."""
        if not (self.is_recording and self._is_registered(module)):
            return module.__dict__["training"]
        if module in self._odd:
            raise self.note(Whole(module))
        return TracedMode(self)

    def decide(self) -> bool:
        """Return `training` to the model's own code that decides by it; a submodule becomes one operation instead."""
        if self._current[-1] != "model":
            raise self.note(Whole(self.root.get_submodule(self._current[-1])))
        self.decision = self.decision or traceback.extract_stack()
        return self._training

    def note(self, error: Exception) -> Exception:
        """Remember and return an error to raise in the model's code, which may catch it and run something else."""
        self._raised = self._raised or error
        return error

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a submodule is one operation."""
        if module_qualified_name == "model":
            return False
        name = module_qualified_name.removeprefix("model.")
        is_torchs = type(m).__module__.startswith(("torch.nn", "torch.ao")) and not isinstance(m, _CONTAINERS)
        has_hooks = m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        is_built = is_torchs or isinstance(m, torch.jit.ScriptModule) or is_compiled(m)
        return is_built or bool(has_hooks) or name in self.whole or type(m) in self.whole

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a submodule's operations, or the submodule as one."""
        if not (self._is_running or self._is_registered(m)) and any(True for _ in m.parameters()):
            kind = type(m).__name__
            raise self.note(Undecided(f"runs a module of type {kind} with weights that is not registered in the model"))
        if self._is_running or not self._is_registered(m):
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        self._current.append(name)
        is_whole = self.is_leaf_module(m, name)
        generators, before = HostGenerators(), own_tensors(m)
        try:
            if is_whole and any(map(has_others, m.modules())):
                raise Undecided("runs a submodule on weights other than its own; call functional_call in a submodule")
            with preserved_generators([]) if is_whole else NOTHING:  # it may draw, as it will in each forward
                found = super().call_module(m, forward, args, kwargs)
            if self._raised is not None:
                self._raised.add_note(", an error that the code catches")
                raise self._raised
            if not is_whole:
                self._recorded.add(m)
                self._refuse_kept(m, before, lambda: forward(*args, **kwargs))
            if generators.find_drawn() is not None:
                place = None
                if name == "model":
                    again = HostGenerators()
                    place = find_line(m, lambda: forward(*args, **kwargs), lambda: again.find_drawn() is not None)
                raise Undecided(
                    "draws random numbers without using an input, which would be the same in every forward; use one, "
                    "as torch.rand_like(x) does",
                    place,
                )
        except Exception as error:
            self.note(error)
            # A submodule becomes one operation, which hides what its code does. The model itself must not: nothing
            # would be cut.
            if not (isinstance(self._raised, Whole) or name in ("", "model") or is_whole):
                self._raised = Whole(m)
            if self._raised is not None and self._raised is not error:
                raise self._raised from error
            raise
        finally:
            self._current.pop()
        return found

    def _refuse_kept(self, m: nn.Module, before: Mapping[str, Any], run: Callable[[], Any]) -> None:
        """Refuse code that leaves what it computed in a buffer, or in an attribute once the whole model has run."""
        is_model = self._current[-1] == "model"
        owner, kept, place = m, find_replaced(m, before), None
        if kept is None and is_model:
            owner, kept = self._find_kept(m)
        if kept is None:
            return
        if owner is not m and owner in self._recorded:
            raise Whole(owner)
        if is_model:
            known = {id(leaf): leaf for leaf in leaves_of(owner, kept)}
            place = find_line(m, run, lambda: any(id(leaf) not in known for leaf in leaves_of(owner, kept)))
        raise Undecided(f"stores a tensor in its attribute or buffer {kept}, which a layer would not do", place)

    def _find_kept(self, model: nn.Module) -> tuple[nn.Module, str | None]:
        for module in reversed([*model.modules()]):
            is_recorded = module in self._recorded  # then it may read what a whole submodule has left there
            for name in module.__dict__:
                leaves = leaves_of(module, name)
                if any(type(leaf) is TracedTensor or (is_recorded and is_fake(leaf)) for leaf in leaves):
                    return module, name
        return model, None

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return an attribute of a module, traced if it is a parameter or buffer."""
        return attr_val if self._is_running else super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> TracedTensor:
        """Return what stands for a node in the model's code."""
        return TracedTensor(node, self)

    def create_arg(self, a: Any) -> Any:
        """Return an argument in the form that the graph stores."""
        if type(a) is TracedTensor:
            return a.node
        if type(a) is TracedShape:
            return super().create_arg(a.whole())
        if isinstance(a, TracedMode):
            return self.create_node("get_attr", "training", (), {})
        if is_fake(a):
            raise self.note(
                Undecided(
                    "uses what a submodule that is one operation has left in an attribute or in an object of its own "
                    "type; return tensors, tuples or dicts"
                )
            )
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            return self._add_constant(a)
        if type(a) is OrderedDict or (type(a) is dict and any(type(key) not in (str, int) for key in a)):
            return self._add_dict(a)
        if (numpy := sys.modules.get("numpy")) is not None and isinstance(a, numpy.generic):
            return a.item()  # a number as layers' code can have it
        return super().create_arg(a)

    def _add_constant(self, made: Tensor) -> fx.Node:
        """Return the node of a tensor that the model's code made from no input, with its present values."""
        key = id(made), made._version
        if key not in self._constants:
            name = free_name(self.root.get_submodule("model"), f"constant_{len(self.constants)}")
            self.constants[name] = made if made.requires_grad else made.clone()  # the code may still change it
            self._constants[key] = self.create_node("get_attr", name, (), {})
            self.values[self._constants[key]] = self._describe_constant(made)
            self._note_place(self._constants[key])
        return self._constants[key]

    def _add_dict(self, made: dict[Any, Any]) -> fx.Node:
        """Return the node that makes a dict which cannot be written in a layer's code: ordered, or of enums."""
        entries = [(self.create_arg(key), self.create_arg(value)) for key, value in made.items()]
        node = self.create_node("call_function", type(made), (entries,), {})
        self.values[node] = tree_map(self._unwrap, made, is_leaf=lambda leaf: type(leaf) is TracedTensor)
        if self._is_trained(node):
            self._trained.add(node)
        self._note_place(node)
        return node

    def _describe_constant(self, made: Tensor) -> Tensor:
        """Return what stands, without data, for a tensor that the model's code made from no input."""
        if made.grad_fn is not None or (made.layout is torch.strided and storage_of(made) in self._own_memory):
            raise Undecided("computes with a weight reached neither by name nor by parameters(), which is not recorded")
        if id(made) not in self._made:
            self._made[id(made)] = made, self._fake.from_tensor(made)
        return self._made[id(made)][1]

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *_: Any, **__: Any) -> Any:
        """Run an operation on tensors without data, and record it if it returns tensors."""
        try:
            return self._create_proxy(kind, target, args, kwargs)
        except Exception as error:
            self.note(error)
            raise

    def _create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        bare = tree_map(self._unwrap, (args, kwargs), is_leaf=lambda leaf: type(leaf) is TracedTensor)
        tensors = [leaf for leaf in tree_leaves(bare) if isinstance(leaf, Tensor)]
        if kind == "output":
            return super().create_proxy(kind, target, args, kwargs)
        if read_settings() != self._settings:
            raise Undecided("computes in a context such as sdpa_kernel, which its layers would not enter")
        versions = [tensor._version for tensor in tensors]
        self._is_running = True
        try:
            compiling = without_compiling() if kind == "call_module" else NOTHING
            with compiling, self._fake, torch.no_grad(), FlopCounter() as counter:
                value = self._run(kind, target, *bare)
        finally:
            self._is_running = False
        pairs = zip(tensors, versions, strict=True)
        changed = {storage_of(tensor) for tensor, version in pairs if tensor._version != version}
        if changed & {storage_of(constant) for _, constant in self._made.values()}:
            raise Undecided(
                "changes a tensor in place that it made itself; make it from another tensor, as x.new_zeros does"
            )
        has_tensors = kind == "placeholder" or any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
        found: Any = None
        if target is torch._assert or not has_tensors:
            is_of_form = (target if isinstance(target, str) else getattr(target, "__name__", "")) in _OF_FORM
            first = args[0].node if args and type(args[0]) is TracedTensor else None
            found = value if is_of_form or first is None else self.show(first, value)
            if kind != "call_module" and not changed:  # a submodule may change its buffers, and return nothing
                return found
        traced = super().create_proxy(kind, target, args, kwargs)
        assert type(traced) is TracedTensor
        traced.value = value
        self._note_place(traced.node)
        if self._is_trained(traced.node):
            if not torch.is_grad_enabled():
                raise Undecided("computes without gradients from weights that are trained")
            self._trained.add(traced.node)
        self.values[traced.node], self.flops[traced.node] = value, counter.total
        self.changed[traced.node] = changed
        if changed & self._weights:
            raise Undecided("changes a parameter in place, of which several layers may have copies")
        if not has_tensors:
            return found
        return open_nest(traced) if type(value) in (dict, OrderedDict, list) and kind != "placeholder" else traced

    def show(self, node: fx.Node, found: Any) -> Any:
        """Return numbers about a node's value to the code that asked for them, and note which sizes it reads.

        Sizes of parameters do not depend on the inputs, and nothing depends on those that torch's transformers check.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and is_ours(frame.f_code.co_filename):
            frame = frame.f_back
        if node.op == "get_attr" or (frame is not None and frame.f_code.co_filename == _TRANSFORMERS):
            return found
        if isinstance(found, torch.Size):
            found = TracedShape(found)
            self.sizes.append(found)
        else:
            self.sizes += [leaf for leaf in tree_leaves(found) if type(leaf) is int]
        return found

    def sizes_read(self) -> list[int]:
        """Return all sizes that the code read."""
        return [
            *chain.from_iterable(one.sizes_read() if isinstance(one, TracedShape) else (one,) for one in self.sizes)
        ]

    def _note_place(self, node: fx.Node) -> None:
        frame = sys._getframe(1)
        while frame.f_code is not Tracer.record.__code__ and frame.f_back is not None:
            file = frame.f_code.co_filename
            if is_of_model(file):
                self.places[node] = traceback.FrameSummary(file, frame.f_lineno, frame.f_code.co_name)
                return
            frame = frame.f_back

    def refuse(self, node: fx.Node, what: str, remedy: str = OF_DECISIONS) -> TracingError:
        """Return an error that tells where the model's code makes a node, and what it does there."""
        place = self.places.get(node)
        return explain(self.root.get_submodule("model"), [] if place is None else [place], what, remedy)

    def _unwrap(self, leaf: Any) -> Any:
        """Return the value, without data, of a part of arguments."""
        if isinstance(leaf, Tensor) and not (isinstance(leaf, nn.Parameter) or is_fake(leaf)):
            return self._describe_constant(leaf)
        return leaf.value if isinstance(leaf, TracedTensor) else True if isinstance(leaf, TracedMode) else leaf

    def _is_trained(self, node: fx.Node) -> bool:
        """Return whether the value of a node depends on trained parameters."""
        if any(used in self._trained for used in node.all_input_nodes):
            return True
        if node.op == "call_module":
            return any(parameter.requires_grad for parameter in self.root.get_submodule(str(node.target)).parameters())
        if node.op != "get_attr":
            return False
        owner, _, name = str(node.target).rpartition(".")
        found = self.root.get_submodule(owner)._parameters.get(name)
        return found is not None and found.requires_grad

    def _run(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        if kind == "placeholder":
            return self._inputs
        if kind == "get_attr":
            found: Any = self.root
            for part in target.split("."):
                found = getattr(found, part) if not isinstance(found, Tensor) else found
            value = self._fake.from_tensor(found) if isinstance(found, Tensor) else found
            if isinstance(found, nn.Parameter):
                self._weights.add(storage_of(value))
            return value
        if kind == "call_module":
            module = self.root.get_submodule(target)
            # Hooks may change what it takes and returns. Those of lazy modules make weights, which must have data.
            has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
            run = module if has_hooks and not any(map(is_lazy, module.parameters())) else module.forward
            try:
                return run(*args, **kwargs)
            except Exception:  # noqa: BLE001 - such as a decision by values, which a named submodule may make
                return self._run_for_real(module, args, kwargs)
        if kind == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)

    def _run_for_real(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a copy of a submodule on equal numbers, to find the shapes of its outputs."""
        self.has_run = True

        def fill(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            number = self._number == 1 if leaf.dtype is torch.bool else self._number
            return torch.full(leaf.shape, number, dtype=leaf.dtype, device=leaf.device)

        with unset_fake_temporarily(), preserved_generators([]):
            args, kwargs = tree_map(fill, (args, kwargs))
            with torch.enable_grad():  # the code may ask for gradients
                found = copy.deepcopy(module).forward(*args, **kwargs)
            found = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, found)
        return tree_map(lambda leaf: self._fake.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, found)


def free_name(module: nn.Module, name: str) -> str:
    """Return a name, with underscores appended until the module has no attribute of that name."""
    while hasattr(module, name):
        name += "_"
    return name


def storage_of(tensor: Tensor) -> int:
    """Return the identity of the memory that a tensor is a view of."""
    return int(tensor.untyped_storage()._cdata)
