"""The one description of a layer: what it computes in a step with a micro-batch, and what it keeps in memory.

The whole model runs forward and backward on tensors that have shapes and no data (torch's FakeTensorMode). So a giant
is described in seconds, and nothing is allocated. The figures of any partition are sums of its layers': see memory.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gpipe._compat.fake_tensors import QuickFakeTensorMode
from gpipe.pipeline.batch_norm import converted_batch_norms, microbatch_phase
from gpipe.pipeline.first_forward import wants_saved_tensors, without_saved_tensors
from gpipe.pipeline.low_precision import lower, wants_low_precision
from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.randomness import preserved_generators
from gpipe.pipeline.shared.tied_parameters import TiedParameters
from gpipe.pipeline.split_backward import DeferredProduct, find_products
from gpipe.planning.errors import layer_error
from gpipe.planning.ledger import Ledger, Work
from gpipe.planning.operation_memory import OperationMemory
from gpipe.planning.repeats import Shortened
from gpipe.planning.without_data import copy_layers, copy_payload

PASSES = ("quiet", "forward", "backward", "first_backward", "last_backward", "last_first_backward")
_FAILURE = "cannot be described without data"
_REMEDY = "check the example's shape, or, if the layer looks at values, give partition_layers your own costs"


class Input(NamedTuple):
    """One tensor of a layer's input, and how long the plain model holds it; layers are counted from this one.

    A stage that begins with the layer holds all of them; one that ends before it, those that its own graph keeps.

    Attributes:
        size: bytes.
        made_by: the layer that made it: -1 is the one before.
        freed_by: the layer that was the last to need it, where no graph keeps it; else None.
        kept_by: the first layer whose graph keeps it; else None.
    """

    size: int
    made_by: int
    freed_by: int | None
    kept_by: int | None

    @property
    def is_kept_before(self) -> bool:
        """Whether a graph of the layers before keeps it."""
        return self.kept_by is not None and self.kept_by < 0


class Arrival(NamedTuple):
    """The gradient of one tensor of a layer's input, as it arrives at the layers before, which are counted from it.

    Attributes:
        size: bytes, as it would travel over a boundary.
        storage_size: bytes that the plain model holds for it, such as those of a larger gradient that it is a part of.
        made_by: the layer that made the tensor, whose backward is the first to use the gradient.
    """

    size: int
    storage_size: int
    made_by: int


@dataclass(frozen=True)
class LayerProfile:
    """One layer, or the loss, with a micro-batch; bytes are of tensors, peaks are above what was held before.

    Attributes:
        parameters: their number, frozen ones too.
        parameter_bytes: the size of its parameters.
        trainable_bytes: the size of those that get a gradient.
        buffer_bytes: the size of its buffers.
        statistics_bytes: what its batch norms note of each micro-batch until the step ends.
        forward: the work of each operation of the forward function.
        backward: likewise of the backward pass.
        weight_gradients: the part of that work that a split backward leaves for later.
        deferred_bytes: what it holds until then.
        gradient_sizes: the bytes of what each of its products makes then, in the order of a backward.
        input_bytes: the size of what it takes from the layer before, which would travel over a boundary.
        inputs: the tensors of its input, except those that outlive the step.
        arrivals: the gradients that its backward, and those of later layers, give the layers before.
        kept_bytes: by how much the graph of the plain model grows over it; what it frees of earlier layers counts.
        forward_peak_bytes: in its forward function, with a graph.
        quiet_peak_bytes: in its forward function, with a graph that keeps no tensors.
        backward_peak_bytes: in its backward pass, above what the graph held when its forward function ended; a
            parameter's gradient is gone as soon as it could be added to the one of an earlier micro-batch.
        first_backward_peak_bytes: likewise in the first backward pass of a step, whose gradients stay.
        last_backward_peak_bytes: in its backward pass as the last layer of a stage. The gradients that arrive are not
            counted: the stage holds them until its backward ends.
        last_first_backward_peak_bytes: likewise in the first backward pass of a step.
        tied_parameters: how many of the parameters an earlier layer shares; each layer has a copy of its own.
        largest_gradient_bytes: the size of the largest parameter that gets a gradient.
        converted_bytes: of the copies of its weights that autocast makes once per step; nothing else here counts them.
        heights: for each pass, what was held at every moment; the peak is the largest. Where a number of examples
            makes another moment the largest one, these say so.
    """

    parameters: int
    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    statistics_bytes: int
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    weight_gradients: tuple[Work, ...]
    deferred_bytes: int
    gradient_sizes: tuple[int, ...]
    input_bytes: int
    inputs: tuple[Input, ...]
    arrivals: tuple[Arrival, ...]
    kept_bytes: int
    forward_peak_bytes: int
    quiet_peak_bytes: int
    backward_peak_bytes: int
    first_backward_peak_bytes: int
    last_backward_peak_bytes: int
    last_first_backward_peak_bytes: int
    tied_parameters: int = 0
    largest_gradient_bytes: int = 0
    converted_bytes: int = 0
    heights: tuple[tuple[int, ...], ...] = field(default=(), compare=False, repr=False)

    @cached_property
    def forward_flops(self) -> int:
        """FLOPs of the forward function, a multiply-add as 2: of matrix products, convolutions and attention."""
        return sum(work.flops for work in self.forward)

    @cached_property
    def backward_flops(self) -> int:
        """FLOPs of the backward pass."""
        return sum(work.flops for work in self.backward)


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer's forward function for one input; a partition's cost is the sum over its layers.

    Attributes:
        flops: FLOPs of the forward function, a multiply-add as 2: of matrix products, convolutions and attention. All
            else (activation functions, norms, pools, embeddings) counts 0: it is bound by memory, not arithmetic, and
            small beside a product. Partitioning takes zeros; where time goes into what this leaves out, partition by
            `seconds`.
        parameters: number of parameters, frozen ones too; one that two layers share counts in both, as each gets a
            copy.
        parameter_bytes: the size of those parameters.
        output_bytes: bytes that would travel over a boundary after the layer; a tensor that occurs twice travels once.
        seconds: median forward time; None where it was not measured.
        tied_parameters: how many of the parameters an earlier layer shares: what all parameters exceed the model's by.
    """

    flops: int
    parameters: int
    parameter_bytes: int
    output_bytes: int
    seconds: float | None = None
    tied_parameters: int = 0


def analyze_layers(layers: nn.Sequential, example: Any) -> list[LayerCost]:
    """Describe every layer in training mode: nothing is computed, and no memory is taken.

    The layers, `example` and torch's global generators stay as they are; layers on the meta device are welcome.

    Args:
        layers: the whole model, in order.
        example: an input of the first layer, with the shapes and types of a micro-batch; only those are looked at.

    Raises:
        ValueError: a layer cannot be described without data, such as one that looks at the values of its input.
    """
    profiles = profile_layers(layers, _sum_outputs, (example, None))
    return [
        LayerCost(
            profile.forward_flops,
            profile.parameters,
            profile.parameter_bytes,
            following.input_bytes,
            tied_parameters=profile.tied_parameters,
        )
        for profile, following in pairwise(profiles)
    ]


def _sum_outputs(outputs: Any, _: Any) -> Tensor:
    """Stand in for the loss of a model that is given without one."""
    tensors = [tensor for tensor in Payload.of(outputs).tensors if tensor.is_floating_point()]
    return sum((tensor.sum() for tensor in tensors), start=torch.zeros(()))


def profile_layers(
    layers: nn.Sequential,
    loss: Callable[[Any, Any], Any],
    example: tuple[Any, Any],
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    measured: OperationMemory | None = None,
    training: bool = True,
) -> list[LayerProfile]:
    """Describe each layer, and after them the loss; nothing is computed or allocated.

    The layers, the example and torch's global generators stay as they are.

    Args:
        layers: the whole model, in order, on any device.
        loss: as for `Pipeline`.
        example: (inputs, targets) of a micro-batch; only shapes and types are looked at.
        autocast: makes the context in which the layers run, for the "cpu" type of device.
        measured: runs some of the layers' operations on this machine's processor, for a plan of what they take there
            inside of themselves; None leaves that out.
        training: whether the layers are in training mode; else in evaluation mode and without graphs, so that what a
            profile says of graphs and backward means nothing.

    Raises:
        ValueError: a layer cannot be described without data, such as one that looks at the values of its input.
    """
    shortened = Shortened.of(layers)
    found = _profile(shortened.layers, loss, example, autocast, measured, training=training)
    if shortened.is_valid([profile.input_bytes for profile in found]):
        found = shortened.expand(found)
    else:
        found = _profile(list(layers), loss, example, autocast, measured, training=training)
    counts = _count_tied_parameters(layers)
    # Equal layers share their profile.
    return [replace(one, tied_parameters=tied) if tied else one for one, tied in zip(found, counts, strict=True)]


def _count_tied_parameters(layers: nn.Sequential) -> list[int]:
    """Count, for each layer and the loss, the parameters that an earlier layer has too: the model has them once."""
    counts = [0] * (len(layers) + 1)
    for _, *others in TiedParameters(layers).groups:
        for member in others:
            counts[member.layer] += layers[member.layer].get_parameter(member.name).numel()
    return counts


class _Chain:
    """The plain model at work, layer by layer, with a ledger of what that takes."""

    def __init__(self, layers: Iterable[nn.Module], loss: Callable[[Any, Any], Any], ledger: Ledger) -> None:
        self.layers: list[nn.Module | None] = [*layers, None]
        self.loss = loss
        self.ledger = ledger
        self.position = 0
        self.input_bytes: list[int] = []
        self._is_backward = False
        self._boundaries: dict[int, list[int]] = {}  # of each living storage, the layers that it is an input of
        self.inputs: list[list[Input]] = [[] for _ in self.layers]
        self.arrivals: list[list[Arrival]] = [[] for _ in self.layers]
        self.live_after = [0] * len(self.layers)
        self.heights: dict[str, list[list[int]]] = {name: [[0] for _ in self.layers] for name in PASSES}
        self.work: dict[str, list[tuple[Work, ...]]] = {name: [()] * len(self.layers) for name in PASSES}
        self.weight_gradients: list[list[Work]] = [[] for _ in self.layers]
        self.gradient_sizes: list[list[int]] = [[] for _ in self.layers]
        self.converted_bytes = [0] * len(self.layers)
        # What waits for them: storages, which may be gone by now, and their bytes.
        self.deferred: list[list[tuple[weakref.ref[torch.UntypedStorage], int]]] = [[] for _ in self.layers]

    def forward(self, value: Any, targets: Any, kind: str) -> Tensor:
        """Run all layers and the loss; note moments and work under `kind`: "quiet" or "forward"."""
        ledger = self.ledger
        payload = Payload.of(value)
        ledger.hold(payload.tensors)
        for index, layer in enumerate(self.layers):
            self.position = index
            if kind == "forward":
                self.input_bytes.append(self._follow(index, payload))
                payload = self._cross(index, payload)
            before = ledger.live_bytes
            ledger.converted_bytes = 0
            ledger.start_moments()
            payload = self._run(layer, payload, targets)
            following = self.layers[index + 1] if layer is not None else None
            if following is not None and wants_low_precision(following):
                payload = lower(payload)
            self.heights[kind][index] = [moment.live - before for moment in ledger.moments]
            self.work[kind][index] = ledger.take_work()
            self.live_after[index] = ledger.live_bytes
            self.converted_bytes[index] = ledger.converted_bytes
        return payload.tensors[0]

    def forward_quietly(self, value: Any, targets: Any) -> None:
        """Run all layers and the loss as `Stage.forward` runs what will be recomputed."""
        try:
            with without_saved_tensors():
                self.forward(value, targets, "quiet")
        except ValueError as error:
            if not wants_saved_tensors(error):
                raise
            self.forward(value, targets, "quiet")

    def _follow(self, index: int, payload: Payload) -> int:
        """Note when each tensor of a layer's input dies; return the bytes of all."""
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in payload.tensors}
        for key, size in storages.items():
            self._boundaries.setdefault(key, []).append(index)
            self.ledger.on_free[key] = partial(self._died, key, size)
        return sum(storages.values())

    def _cross(self, index: int, payload: Payload) -> Payload:
        """Return a layer's input as it is; the gradients that arrive there will be noted."""
        wanted = [tensor for tensor in payload.tensors if tensor.requires_grad]
        if not wanted:
            return payload
        made_by = [self._boundaries[tensor.untyped_storage()._cdata][0] - 1 - index for tensor in wanted]
        crossed = iter(_Boundary.apply(partial(self._arrive, index, made_by), *wanted))  # type: ignore[no-untyped-call]
        return payload.replace([next(crossed) if tensor.requires_grad else tensor for tensor in payload.tensors])

    def _arrive(self, index: int, made_by: list[int], gradients: tuple[Tensor | None, ...]) -> None:
        """Begin the backward of the layer before."""
        self._note_backward()
        self.position = index - 1
        found = [(gradient, maker) for gradient, maker in zip(gradients, made_by, strict=True) if gradient is not None]
        storages = set[int]()
        for gradient, maker in found:
            storage = gradient.untyped_storage()
            storage_size = 0 if storage._cdata in storages else storage.nbytes()
            storages.add(storage._cdata)
            self.arrivals[index].append(Arrival(gradient.nbytes, storage_size, maker))
        self.ledger.start_moments(gradient for gradient, _ in found)

    def _died(self, key: int, size: int) -> None:
        boundaries = self._boundaries.pop(key)
        for boundary in boundaries:
            at = self.position - boundary
            freed, kept = (None, at) if self._is_backward else (at, None)
            self.inputs[boundary].append(Input(size, boundaries[0] - 1 - boundary, freed, kept))

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass; note moments and work. A graph lets go of what it keeps layer by layer."""
        self._is_backward = True
        self.ledger.start_moments()
        self.position = len(self.layers) - 1
        with self._blamed():
            if loss.requires_grad:  # else everything is frozen
                _, products = find_products([get_gradient_edge(loss).node])
                hooks = [product.node.register_prehook(partial(self._defer, product)) for product in products]
                loss.backward()
                for hook in hooks:  # which know their operations
                    hook.remove()
        self._note_backward()

    def _defer(self, product: DeferredProduct, gradients: tuple[Tensor | None, ...]) -> None:
        """Note what it would take and hold to make the gradients of a product's weights later."""
        if (gradient := gradients[0]) is None:
            return
        with self.ledger.beside() as work:
            made = [found.nbytes for found in product.prepare()(gradient) if found is not None]
        self.gradient_sizes[self.position].append(sum(made))
        self.weight_gradients[self.position] += work
        held = self.deferred[self.position]
        for storage in (gradient.untyped_storage(), product.inputs.untyped_storage()):
            if not any(known() is storage for known, _ in held):
                held.append((weakref.ref(storage), storage.nbytes()))

    def _run(self, layer: nn.Module | None, payload: Payload, targets: Any) -> Payload:
        with self._blamed():
            if layer is None:
                found = self.loss(payload.value(), targets)
                return Payload.of(found[0] if isinstance(found, tuple) else found)
            return Payload.of(layer(payload.value()))

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            layer = self.layers[self.position]
            name = "The loss" if layer is None else f"Layer {self.position} ({type(layer).__name__})"
            raise layer_error(name, error, _FAILURE, _REMEDY) from error

    def let_go(self, parameter: Tensor) -> None:
        """Drop a gradient that has just been computed, and note what keeping it would have cost."""
        assert parameter.grad is not None
        self.ledger.added_bytes += parameter.grad.nbytes
        parameter.grad = None

    def _note_backward(self) -> None:
        at, moments = self.position, self.ledger.moments
        held = self.live_after[at]
        self.heights["backward"][at] += [one.live - held for one in moments]
        self.heights["first_backward"][at] += [one.live + one.added - held for one in moments]
        self.heights["last_backward"][at] += [one.live - one.aside - held for one in moments]
        self.heights["last_first_backward"][at] += [one.live + one.added - one.aside - held for one in moments]
        self.work["backward"][at] += self.ledger.take_work()


class _Boundary(torch.autograd.Function):
    """The identity between two layers, which tells of the gradients that arrive."""

    @staticmethod
    def forward(ctx: Any, tell: Callable[[tuple[Tensor | None, ...]], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.tell = tell
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.tell(gradients)
        return None, *gradients


def _profile(
    layers: Sequence[nn.Module],
    loss: Callable[[Any, Any], Any],
    example: tuple[Any, Any],
    autocast: Callable[[], AbstractContextManager[Any]],
    measured: OperationMemory | None,
    *,
    training: bool,
) -> list[LayerProfile]:
    with QuickFakeTensorMode(), preserved_generators(()), torch.device("cpu"):
        copies, constants = copy_layers(layers)
        fakes = nn.ModuleList(copies).train(training)
        with autocast():
            converted = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        ledger = Ledger(chain(fakes.parameters(), fakes.buffers(), constants), measured, converted)
        chain_ = _Chain(fakes, loss, ledger)
        for parameter in fakes.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(chain_.let_go)
        inputs, targets = (copy_payload(part) for part in example)
        with chain_.ledger, microbatch_phase(converted_batch_norms(fakes), recompute=True):
            chain_.ledger.hold(targets.tensors)
            if training:
                with autocast(), torch.enable_grad():
                    chain_.forward_quietly(inputs.value(), targets.value())
            start = chain_.ledger.live_bytes
            with autocast(), torch.set_grad_enabled(training):
                value = chain_.forward(inputs.value(), targets.value(), "forward")
            if training:
                chain_.backward(value)
            else:
                chain_.heights["quiet"] = chain_.heights["forward"]
    return [_layer_profile(chain_, index, start) for index in range(len(layers) + 1)]


def _layer_profile(chain_: _Chain, index: int, start: int) -> LayerProfile:
    layer = chain_.layers[index]
    parameters = [] if layer is None else list(layer.parameters())
    norms = [] if layer is None else converted_batch_norms([layer])
    before = chain_.live_after[index - 1] if index > 0 else start
    return LayerProfile(
        parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=sum(parameter.nbytes for parameter in parameters),
        trainable_bytes=sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        buffer_bytes=0 if layer is None else sum(buffer.nbytes for buffer in layer.buffers()),
        statistics_bytes=sum(buffer.nbytes for norm in norms for buffer in norm.buffers() if buffer.ndim > 0),
        forward=chain_.work["forward"][index],
        backward=chain_.work["backward"][index],
        weight_gradients=tuple(chain_.weight_gradients[index]),
        deferred_bytes=sum(size for _, size in chain_.deferred[index]),
        gradient_sizes=tuple(chain_.gradient_sizes[index]),
        input_bytes=chain_.input_bytes[index],
        inputs=tuple(chain_.inputs[index]),
        arrivals=tuple(chain_.arrivals[index]),
        kept_bytes=chain_.live_after[index] - before,
        **{f"{name}_peak_bytes": max(found[index]) for name, found in chain_.heights.items()},
        heights=tuple(tuple(chain_.heights[name][index]) for name in PASSES),
        largest_gradient_bytes=max((each.nbytes for each in parameters if each.requires_grad), default=0),
        converted_bytes=chain_.converted_bytes[index],
    )
