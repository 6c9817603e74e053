"""The plain model, run layer by layer on tensors without data: what is alive at each moment, and what is computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gpipe.pipeline.layers.first_forward import wants_saved_tensors, without_saved_tensors
from gpipe.pipeline.layers.low_precision import lower, wants_low_precision
from gpipe.pipeline.layers.split_backward import DeferredProduct, find_products
from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.wire.format import count_bytes
from gpipe.planning.errors import layer_error
from gpipe.planning.ledger import Ledger, Work

_Value = TypeVar("_Value")
_FAILURE = "cannot be described without data"
_REMEDY = (
    "check the example's shape, or, if the layer reads values, describe it with measure_layers, or give "
    "partition_layers your own costs"
)


class PerPass(NamedTuple, Generic[_Value]):
    """Something for each way to run a layer, such as the bytes that it holds above what was held before.

    Attributes:
        quiet: in its forward function, with a graph that keeps no tensors.
        forward: in its forward function, with a graph.
        backward: in its backward pass, above what the graph held when its forward function ended; a parameter's
            gradient is freed as soon as it could be added to that of an earlier micro-batch.
        first_backward: likewise in the first backward pass of a step, whose gradients stay.
        last_backward: in its backward pass as the last layer of a stage. The gradients that arrive are not counted: the
            stage holds them until its backward ends.
        last_first_backward: likewise in the first backward pass of a step.
        split_backward: in its backward pass, including what is held until its weights' gradients are made.
        last_split_backward: likewise as the last layer of a stage.
    """

    quiet: _Value
    forward: _Value
    backward: _Value
    first_backward: _Value
    last_backward: _Value
    last_first_backward: _Value
    split_backward: _Value
    last_split_backward: _Value


class Input(NamedTuple):
    """One tensor of a layer's input, and how long the plain model holds it; layers are counted from this one.

    A stage that begins with the layer holds all of them; a stage that ends before it holds those that its graph keeps.

    Attributes:
        size: bytes.
        made_by: the layer that made it; -1 is the one before.
        freed_by: the last layer that needs it, if no graph keeps it; otherwise None.
        kept_by: the first layer whose graph keeps it, if one does; otherwise None.
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
        storage_size: bytes that the plain model holds for it, which may be a larger gradient that it is part of.
        made_by: the layer that made the tensor, whose backward is the first to use the gradient.
    """

    size: int
    storage_size: int
    made_by: int


class WaitingGradient(NamedTuple):
    """The gradients of one product's weights, which a split backward makes later.

    Attributes:
        size: bytes that the product makes.
        peak_bytes: the peak while it does, including these.
        final_size: bytes of the parameters' gradients that result.
        is_added: whether they are added directly if the parameters have gradients; otherwise they wait for others.
    """

    size: int
    peak_bytes: int
    final_size: int
    is_added: bool


class ObservedModel:
    """The plain model, run layer by layer, with a ledger of its memory and work."""

    def __init__(self, layers: Iterable[nn.Module], loss: Callable[[Any, Any], Any], ledger: Ledger) -> None:
        self.layers: list[nn.Module | None] = [*layers, None]
        self.loss = loss
        self.ledger = ledger
        self.position = 0
        self.input_bytes: list[int] = []
        self.boundary_bytes: list[int] = []
        self._is_backward = False
        self._boundaries: dict[int, list[int]] = {}  # for each living storage, the layers that it is an input of
        self.inputs: list[list[Input]] = [[] for _ in self.layers]
        self.arrivals: list[list[Arrival]] = [[] for _ in self.layers]
        self.live_after = [0] * len(self.layers)
        self.heights: dict[str, list[list[int]]] = {name: [[0] for _ in self.layers] for name in PerPass._fields}
        self.work: dict[str, list[tuple[Work, ...]]] = {name: [()] * len(self.layers) for name in PerPass._fields}
        self.weight_gradients: list[list[Work]] = [[] for _ in self.layers]
        self.waiting_gradients: list[list[WaitingGradient]] = [[] for _ in self.layers]
        self.converted_bytes = [0] * len(self.layers)
        # What is held for them: storages, which may be gone by now, and their bytes.
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
                self.boundary_bytes.append(sum(map(count_bytes, payload.tensors)))
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
        """Run all layers and the loss as `Stage.forward` does for a later recomputation."""
        try:
            with without_saved_tensors():
                self.forward(value, targets, "quiet")
        except ValueError as error:
            if not wants_saved_tensors(error):
                raise
            self.forward(value, targets, "quiet")

    def _follow(self, index: int, payload: Payload) -> int:
        """Note when each tensor of a layer's input dies; return the bytes of all of them."""
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in payload.tensors}
        for key, size in storages.items():
            self._boundaries.setdefault(key, []).append(index)
            self.ledger.on_free[key] = partial(self._died, key, size)
        return sum(storages.values())

    def _cross(self, index: int, payload: Payload) -> Payload:
        """Return a layer's input unchanged, and note the gradients that will arrive there."""
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
        """Run the backward pass; note moments and work. The graph frees what it keeps layer by layer."""
        self._is_backward = True
        self.ledger.start_moments()
        self.position = len(self.layers) - 1
        with self._blamed():
            if loss.requires_grad:  # otherwise everything is frozen
                _, products = find_products([get_gradient_edge(loss).node])
                hooks = [product.node.register_prehook(partial(self._defer, product)) for product in products]
                loss.backward()
                for hook in hooks:  # they refer to their operations
                    hook.remove()
        self._note_backward()

    def _defer(self, product: DeferredProduct, gradients: tuple[Tensor | None, ...]) -> None:
        """Note what making the gradients of a product's weights later would take, and hold until then."""
        if (gradient := gradients[0]) is None:
            return
        inputs = product.inputs

        def make() -> int:
            return sum(found.nbytes for found in product.prepare(inputs)(gradient) if found is not None)

        size, work, peak_bytes = self.ledger.run_beside(make)
        final = sum(end.leaf.variable.nbytes for end in product.ends)
        is_added = all(end.is_own or end.is_transposed for end in product.ends)
        self.waiting_gradients[self.position].append(WaitingGradient(size, peak_bytes, final, is_added))
        self.weight_gradients[self.position] += work
        held = self.deferred[self.position]
        for storage in (gradient.untyped_storage(), inputs.untyped_storage()):
            if not any(known() is storage for known, _ in held):
                held.append((weakref.ref(storage), storage.nbytes()))
                self.ledger.wait(storage)

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
        """Drop a gradient that has just been computed, and note the memory that it would have kept."""
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
        self.heights["split_backward"][at] += [one.live + one.waiting - held for one in moments]
        self.heights["last_split_backward"][at] += [one.live + one.waiting - one.aside - held for one in moments]
        self.work["backward"][at] += self.ledger.take_work()


class _Boundary(torch.autograd.Function):
    """The identity between two layers, which reports the gradients that arrive."""

    @staticmethod
    def forward(ctx: Any, tell: Callable[[tuple[Tensor | None, ...]], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.tell = tell
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.tell(gradients)
        return None, *gradients
