"""One partition at work: forward, recomputation and backward of its micro-batches (re-materialisation)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gpipe.pipeline.autocast import without_autocast
from gpipe.pipeline.batch_norm import converted_batch_norms, discard, microbatch_phase
from gpipe.pipeline.job.errors import LostPeer, PipelineError, place
from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.probe import Probe
from gpipe.pipeline.randomness import derive_seed, seed_generators
from gpipe.pipeline.shared.replicas import Averaging

if TYPE_CHECKING:
    from gpipe.pipeline.shared.synchronized_norm import StatisticsExchange, SynchronizedMicroBatch

MASKS = 0x3A5  # keeps the seeds of dropout and drop-path masks apart from those of initial weights

Loss = Callable[[Any, int], Tensor]
"""(outputs of a micro-batch, its index) -> its weighted share of the mini-batch's loss, a scalar."""


class _Entry(torch.autograd.Function):
    """Where a stage's graph begins: the identity, which hands the gradients over as they are.

    A leaf's `.grad` would do, but for one thing: it copies the gradient into the memory layout of the leaf, and the
    kernels before the boundary would then add up in another order than in the plain model.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)  # view_as would give size-1 dimensions new strides

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.gradients[:] = gradients
        return (None,) * (2 + len(gradients))


_ANCHOR = torch.empty(0, requires_grad=True)  # makes autograd call _Entry's backward; gets no gradient itself


@dataclass(slots=True)
class _Kept:
    """What a stage holds of a micro-batch between its forward and its backward."""

    inputs: Payload
    gradients: list[Tensor | None]  # of the differentiable inputs, once backward has run
    roots: list[GradientEdge | None] | None = None  # one an output; None until a graph exists
    outputs: list[Tensor] | None = None  # the outputs themselves, where the replicas' averaging must see them
    synchronized: SynchronizedMicroBatch | None = None  # statistics over all replicas, where batch norms have them


class Stage:
    """A partition bound to a device.

    Between a forward and its backward it holds the boundary input of each micro-batch, and the graph only of those
    that are kept or just recomputed. Outputs are not held: the graph knows what it needs of them.
    """

    def __init__(self, index: int, layers: Mapping[int, nn.Module], device: torch.device, seed: int) -> None:
        self.index = index
        self.layers = dict(layers)
        self.device = device
        self.seed = seed
        self.step = 0
        self.loss: Loss | None = None  # set in the last stage for the time of a training step
        self.averaging: Averaging | None = None
        self.exchange: StatisticsExchange | None = None  # where batch norms are synchronised over replicas
        self.final_micro_batch = 0  # the one whose backward ends the step
        self.trainable = False
        self._batch_norms = converted_batch_norms(self.layers.values())
        discard(self._batch_norms)
        self._compiled: dict[nn.Module, Callable[[Any], Any]] = {}
        self._kept: dict[int, _Kept] = {}
        self._position: tuple[int, nn.Module | None] = (0, None)  # the layer under way, for error messages
        self._last = max(self.layers)

    @property
    def num_kept(self) -> int:
        """The number of micro-batches of which something is held."""
        return len(self._kept)

    def compile(self, **options: Any) -> None:
        """Run the layers through torch.compile from now on."""
        self._compiled = {layer: _compiled(layer, index, options) for index, layer in self.layers.items()}

    def start_step(self, step: int, loss: Loss | None, final_micro_batch: int) -> None:
        """Prepare for the training step with number `step`, which seeds the masks."""
        self.step = step
        self.loss = loss
        self.final_micro_batch = final_micro_batch
        self.trainable = any(p.requires_grad for layer in self.layers.values() for p in layer.parameters())
        if self.averaging is not None:
            self.averaging.start_step()

    def reset(self) -> None:
        """Let go of everything, after a step that failed."""
        self._kept.clear()
        self.loss = None

    def forward(self, micro_batch: int, inputs: Payload, *, keep_graph: bool) -> Payload:
        """Run the layers on a micro-batch, with a graph or for a later `recompute`; return the boundary output."""
        kept = self._kept[micro_batch] = _Kept(inputs, [None] * sum(inputs.differentiable))
        kept.synchronized = self.exchange.start(notes=True) if self.exchange is not None else None
        with microbatch_phase(self._batch_norms, recompute=False, synchronized=kept.synchronized):
            if keep_graph:
                return self._run_with_graph(micro_batch, kept, "forward")
            with torch.no_grad():
                outputs = self._run(micro_batch, inputs, "forward", guard_inputs=True)
        # Without a graph nobody knows which outputs depend on a parameter: ask for all gradients that could exist. The
        # backward of the producer ignores those that turn out to be of no use.
        held = {id(tensor): wanted for tensor, wanted in zip(inputs.tensors, inputs.differentiable, strict=True)}
        possible = self.trainable or any(inputs.differentiable)
        outputs.differentiable = [
            held.get(id(tensor), possible and (tensor.is_floating_point() or tensor.is_complex()))
            for tensor in outputs.tensors
        ]
        return outputs

    def recompute(self, micro_batch: int) -> None:
        """Run the forward again from the boundary input, with the same masks, and keep its graph."""
        kept = self._kept[micro_batch]
        if kept.synchronized is not None:
            kept.synchronized.recompute()
        with microbatch_phase(self._batch_norms, recompute=True, synchronized=kept.synchronized):
            self._run_with_graph(micro_batch, kept, "recompute")

    def backward(self, micro_batch: int, gradients: list[Tensor | None] | None) -> Payload:
        """Add this micro-batch's gradients to the parameters' `.grad`; return those of the boundary input.

        Args:
            micro_batch: one that was kept or recomputed; what was held of it is let go.
            gradients: one for each output of the stage, None for those without; None altogether in the last stage.

        Returns:
            A payload that nests the gradients of the input's tensors in a tuple, None where there is none.
        """
        kept = self._kept.pop(micro_batch)
        assert kept.roots is not None, "the schedule forgot to recompute"
        if gradients is None:  # the only root is the loss: a scalar needs no gradient to start from
            pairs: list[tuple[GradientEdge, Tensor | None]] = [(root, None) for root in kept.roots if root is not None]
        else:
            pairs = [(r, g) for r, g in zip(kept.roots, gradients, strict=True) if r is not None and g is not None]
        anchors = kept.synchronized.anchors if kept.synchronized is not None else []
        pairs += [(get_gradient_edge(anchor), None) for anchor in anchors]
        self._position = (self._last, self.layers[self._last]) if self.loss is None else (self._last + 1, None)
        try:
            with without_autocast(self.device):
                if kept.outputs is not None and self.averaging is not None:
                    self._backward_averaged(pairs, kept.outputs, gradients, anchors, self.averaging)
                elif pairs:
                    torch.autograd.backward([root for root, _ in pairs], [seed for _, seed in pairs])
        except (PipelineError, LostPeer):
            raise
        except Exception as error:
            raise self._at(error, micro_batch, "backward") from error
        found = iter(kept.gradients)
        return Payload.of(tuple(next(found) if wanted else None for wanted in kept.inputs.differentiable))

    def _backward_averaged(
        self,
        pairs: list[tuple[GradientEdge, Tensor | None]],
        outputs: list[Tensor],
        gradients: list[Tensor | None] | None,
        anchors: list[Tensor],
        averaging: Averaging,
    ) -> None:
        if gradients is not None:  # one that no gradient comes back for takes no part in this backward
            outputs = [t for t, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
        extra = averaging.average_in_backward([t for t in outputs if t.requires_grad] + anchors)
        pairs = pairs + [(get_gradient_edge(tensor), None) for tensor in extra]
        if pairs:
            with averaging.replicas.exchange():
                torch.autograd.backward([root for root, _ in pairs], [seed for _, seed in pairs])

    def evaluate(self, micro_batch: int, inputs: Payload, layers: Mapping[int, nn.Module]) -> Payload:
        """Run substitute or own layers without a graph and return the boundary output."""
        return self._run(micro_batch, inputs, "evaluation", layers=layers)

    def probe(self, micro_batch: int, inputs: Payload, probe: Probe) -> Payload:
        """Run the forward of a training step again, with the same masks and without a graph, under the eyes of `probe`.

        The layers are not compiled: what one of them does is then seen by itself.
        """
        watched = {index: probe.watch(self, micro_batch, index, layer) for index, layer in self.layers.items()}
        synchronized = self.exchange.start(notes=False) if self.exchange is not None else None
        with torch.no_grad(), microbatch_phase(self._batch_norms, recompute=True, synchronized=synchronized):
            return self._run(micro_batch, inputs, "forward", layers=watched)

    def _run_with_graph(self, micro_batch: int, kept: _Kept, doing: str) -> Payload:
        with torch.enable_grad():
            outputs = self._run(micro_batch, _entered(kept), doing)
            if self.loss is not None:
                self._enter(micro_batch, self._last + 1, None)
                try:
                    outputs = Payload.of(self.loss(outputs.value(), micro_batch))
                except (PipelineError, LostPeer):
                    raise
                except Exception as error:
                    raise self._at(error, micro_batch, "loss") from error
        kept.roots = [get_gradient_edge(t) if t.requires_grad else None for t in outputs.tensors]
        if self.averaging is not None and micro_batch == self.final_micro_batch:
            kept.outputs = outputs.tensors
        return outputs

    def _run(
        self,
        micro_batch: int,
        inputs: Payload,
        doing: str,
        *,
        layers: Mapping[int, nn.Module] | None = None,
        guard_inputs: bool = False,
    ) -> Payload:
        payload, value = inputs, inputs.value()
        versions = [tensor._version for tensor in inputs.tensors] if guard_inputs else []
        try:
            for index, layer in (self.layers if layers is None else layers).items():
                self._enter(micro_batch, index, layer)
                passed_by = [tensor.grad_fn for tensor in payload.tensors]
                value = self._compiled.get(layer, layer)(value)
                # Taken apart after each layer, so that what cannot travel is refused wherever the boundaries are.
                payload = Payload.of(value)
                if guard_inputs:
                    self._refuse_changed_inputs(inputs, versions)
                elif torch.is_grad_enabled() and (index < self._last or self.loss is not None):
                    self._announce_backward(payload, passed_by, index, layer)
        except (PipelineError, LostPeer):
            raise
        except Exception as error:
            raise self._at(error, micro_batch, doing) from error
        return payload

    def _enter(self, micro_batch: int, index: int, layer: nn.Module | None) -> None:
        self._position = (index, layer)
        seed_generators(derive_seed(MASKS, self.seed, self.step, micro_batch, index), self.device)

    def _announce_backward(self, outputs: Payload, passed_by: list[Node | None], index: int, layer: nn.Module) -> None:
        """Note the layer when its backward begins, so that an error in there can name it.

        Args:
            outputs: of the layer.
            passed_by: the backwards of layers before it, which its outputs may have as well.
            index: the layer's.
            layer: the layer.
        """
        for tensor in outputs.tensors:
            if tensor.grad_fn is not None and tensor.grad_fn not in passed_by:
                tensor.register_hook(lambda _: setattr(self, "_position", (index, layer)))

    def _refuse_changed_inputs(self, inputs: Payload, versions: list[int]) -> None:
        if any(tensor._version != version for tensor, version in zip(inputs.tensors, versions, strict=True)):
            raise ValueError(
                "the layer changed the stage's stored input in place, and the recomputation would start from the "
                "changed one; use the layer's out-of-place form (inplace=False) or rematerialize='never'"
            )

    def describe(self, micro_batch: int, doing: str) -> str:
        """Return in words where this stage is: the micro-batch, the layer under way, and what is done with it."""
        layer, module = self._position
        return place(self.index, micro_batch, layer, module, doing)

    def _at(self, error: Exception, micro_batch: int, doing: str) -> PipelineError:
        """Return an error that says where another one happened: in a layer or the loss."""
        layer, module = self._position
        return PipelineError.at(error, doing, stage=self.index, micro_batch=micro_batch, layer=layer, module=module)


def _compiled(layer: nn.Module, index: int, options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return the layer through torch.compile; what the model holds stays as it is.

    `nn.Module.compile` silently compiles nothing where the layer's class is one of torch's own. And torch.compile gives
    up, as silently, after a few variants of one code object, which all layers of a class would share: each layer gets
    its own.
    """

    def run(value: Any) -> Any:
        return layer(value)

    run.__code__ = run.__code__.replace(co_name=f"layer_{index}")
    return cast(Callable[[Any], Any], torch.compile(run, **options))


def _entered(kept: _Kept) -> Payload:
    """Return the boundary input as the beginning of a graph."""
    inputs = kept.inputs
    wanted = [tensor for tensor, is_wanted in zip(inputs.tensors, inputs.differentiable, strict=True) if is_wanted]
    if not wanted:
        return inputs
    entered = iter(_Entry.apply(kept.gradients, _ANCHOR, *wanted))  # type: ignore[no-untyped-call]
    tensors = [
        next(entered) if is_wanted else t for t, is_wanted in zip(inputs.tensors, inputs.differentiable, strict=True)
    ]
    return Payload(tensors, inputs.structure, inputs.differentiable)
