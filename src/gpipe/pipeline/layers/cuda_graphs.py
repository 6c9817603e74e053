"""The layers of a stage as CUDA graphs: one launch per layer, instead of hundreds of operations.

    layer --- first run, plain ---> captured: a graph of its forward, and one of its backward if it has one
    input --- copied ---> memory of the graph --- replay ---> its outputs, in memory of the graph

A graph runs the same kernels on the same memory each time. So what is kept for one backward must not be overwritten:
each micro-batch has a pair of graphs of its own until its backward has run. Forwards that will be recomputed keep
nothing, and share one graph.

The seed of a layer's masks is set before each replay, as before each plain run. A graph reads it again each time, so
the masks are those of the plain layer.

A layer's Python code runs only when the layer is captured. Changes that can be seen from outside make another graph:
shapes, precision, attributes that are replaced (not changes inside them), training mode. Layers that change buffers are
not captured, except for batch norms, whose statistics are copied out of the graph. Nor are those that take or return
several tensors in the same memory.

Why not torch.compile(mode="reduce-overhead"): see `refuse_cuda_graphs`. Why not torch.cuda.make_graphed_callables: it
has one pair of graphs per layer, synchronises the device (where a stage would wait for another one that waits for it),
and gives parameters gradients in the graph's own memory, which the next micro-batch overwrites.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call

from gpipe.pipeline._compat import add_to_each, apply_function
from gpipe.pipeline.batch_norm import MicroBatchNorm, converted_batch_norms, is_recomputing
from gpipe.pipeline.checks.refusals import refuse_hidden_parameters
from gpipe.pipeline.layers.autocast import without_autocast
from gpipe.pipeline.layers.buffers import Buffers
from gpipe.pipeline.layers.entry import enter_graph
from gpipe.pipeline.layers.structure import structure
from gpipe.pipeline.microbatch import Payload

warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # that of a layer which only makes views

# Each variant has memory of its own. A layer that meets more, such as sentences of many lengths, runs plainly.
_MOST_VARIANTS = 16
# So does a layer that changes more often, such as by an attribute set in each step: a capture takes longer than a run.
_MOST_CHANGES = 8


@dataclass(slots=True)
class _Captured:
    """A forward as a graph, and its backward."""

    forward: torch.cuda.CUDAGraph
    inputs: list[Tensor]  # where it reads
    outputs: Payload  # where it writes; the flags say which of them have a gradient
    passed: list[int | None]  # for each output, which of the inputs it is; None for the layer's own
    statistics: list[tuple[MicroBatchNorm, Tensor, int]]  # each in memory of the graph, and its number of values
    backward: torch.cuda.CUDAGraph | None = None  # None where no backward follows, or nothing has a gradient
    seeds: Sequence[Tensor | None] = ()  # where it reads, for each output with a gradient; None if none arrives
    parameters: Sequence[nn.Parameter] = ()  # those of the layer that are trained
    gradients: Sequence[Tensor | None] = ()  # where it writes, for the differentiable inputs, then the parameters

    @torch.no_grad()
    def run(self, inputs: Sequence[Tensor]) -> None:
        """Run the forward on some inputs."""
        for own, tensor in zip(self.inputs, inputs, strict=True):
            own.copy_(tensor)
        self.forward.replay()
        if self.statistics:  # copied in one launch
            together = torch.cat([moments.flatten() for _, moments, _ in self.statistics])
            copies = together.split([moments.numel() for _, moments, _ in self.statistics])
            for (norm, _, count), moments in zip(self.statistics, copies, strict=True):
                norm.__dict__["fresh"] = (*norm.fresh, moments.view(2, -1), count)

    def collect(self, inputs: Sequence[Tensor]) -> Payload:
        """Return the layer's outputs in the graph's memory, and the inputs that it returns unchanged."""
        pairs = zip(self.outputs.tensors, self.passed, strict=True)
        return self.outputs.replace([own.detach() if place is None else inputs[place] for own, place in pairs])


class _Replay(torch.autograd.Function):
    """A captured forward and backward in place of a layer's own."""

    @staticmethod
    def forward(ctx: Any, captured: _Captured, inputs: Sequence[Tensor], *sources: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004 - for the graph
        ctx.captured = captured
        ctx.set_materialize_grads(False)
        captured.run(inputs)
        return tuple(tensor.detach() for tensor in captured.collect(inputs).differentiable_tensors())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        captured: _Captured = ctx.captured
        for seed, gradient in zip(captured.seeds, gradients, strict=True):
            if (seed is None) != (gradient is None):
                raise RuntimeError(
                    "different outputs of the layer have gradients than when it was captured as a CUDA graph; let the "
                    "layers after it use the same ones in each micro-batch, or set trainer.cuda_graphs=false"
                )
            if seed is not None and gradient is not None:
                seed.copy_(gradient)
        assert captured.backward is not None
        captured.backward.replay()
        # The tensors themselves, which others hold: so autograd copies one before it adds to it or makes it a gradient.
        num_inputs = len(captured.gradients) - len(captured.parameters)
        of_inputs, of_parameters = captured.gradients[:num_inputs], captured.gradients[num_inputs:]
        return None, None, *of_inputs, *_add(captured.parameters, of_parameters)


def _add(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Add to the gradients of a layer's parameters in a few launches; return what is left for autograd to add.

    Autograd creates the first gradients and calls hooks. One launch per parameter would be most of a step's launches.
    """
    pairs = [(p.grad, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    sums, parts = [own for own, _ in pairs if own is not None], [part for _, part in pairs]
    is_hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
    if is_hooked or len(sums) < len(pairs):
        return gradients
    if sums:
        add_to_each(sums, parts)
    return [None] * len(gradients)


class _Note(torch.autograd.Function):
    """The identity behind a layer that is yet to be captured, which notes what its backward starts from."""

    @staticmethod
    def forward(ctx: Any, variant: _Variant, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.variant = variant
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.variant.seeds = [None if gradient is None else torch.empty_like(gradient) for gradient in gradients]
        return None, *gradients


@dataclass(slots=True)
class _Variant:
    """A layer with inputs of one kind, in one kind of task."""

    # Such as its backward starts from; empty without a backward. None until it has run plainly, with its backward: then
    # kernels are chosen, and libraries have allocated their memory.
    seeds: list[Tensor | None] | None = None
    captured: list[_Captured] = field(default_factory=list)  # the graphs that no micro-batch uses now


class LayerGraphs:
    """Runs the layers of a stage as CUDA graphs, except those that change `buffers`."""

    def __init__(self, layers: Mapping[int, nn.Module], device: torch.device, buffers: Buffers) -> None:
        self._layers, self._device, self._buffers = layers, device, buffers
        self._stream = torch.cuda.Stream(device)
        self._kinds: dict[int, Hashable] = {}
        self._num_changes: Counter[int] = Counter()
        self._variants: dict[int, dict[Hashable, _Variant]] = {index: {} for index in layers}
        self._held: dict[int, list[tuple[_Variant, _Captured]]] = {}  # by micro-batch, until its backward has run

    def start_step(self) -> None:
        """Drop the graphs of layers that have changed since they were captured."""
        for index, layer in self._layers.items():
            tensors = [*layer.parameters(), *layer.buffers()]
            # Gradients go to the captured parameters themselves. The graph keeps them, so their ids are not reused.
            kind = structure(layer), tuple((id(tensor), tensor.data_ptr()) for tensor in tensors)
            if self._kinds.get(index) != kind:
                self._num_changes[index] += index in self._kinds
                self._kinds[index] = kind
                self._variants[index].clear()

    def run(self, index: int, value: Any, micro_batch: int | None) -> Any:
        """Run a layer: plainly the first time, then as a graph.

        The returned value is overwritten by the next micro-batch, or by the next one after `release`.

        Args:
            index: of the layer.
            value: its input.
            micro_batch: whose backward will run; None where none will.

        Raises:
            ValueError: the layer cannot be captured.
        """
        layer, inputs = self._layers[index], Payload.of(value)
        inputs.find_shared(inputs)
        variants = self._variants[index]
        kind = _describe(inputs, self._device, has_backward=micro_batch is not None)
        variant = variants.get(kind)
        if variant is None and len(variants) < _MOST_VARIANTS and self._num_changes[index] <= _MOST_CHANGES:
            variant = variants[kind] = _Variant()
        # Tensors that share memory change together; copies in graphs would not.
        if variant is None or inputs.shared or (not variant.captured and self._buffers.has_changed(layer)):
            return layer(value)
        if variant.seeds is None:
            return _run_plainly(layer, value, variant, has_backward=micro_batch is not None)
        captured = variant.captured.pop() if variant.captured else self._capture(layer, inputs, variant.seeds)
        if micro_batch is None:
            variant.captured.append(captured)
            captured.run(inputs.tensors)
            outputs = captured.collect(inputs.tensors)
            leaves = (tensor.detach().requires_grad_() for tensor in outputs.differentiable_tensors())
            return outputs.replace_differentiable(leaves).value()
        self._held.setdefault(micro_batch, []).append((variant, captured))
        replayed = apply_function(
            _Replay, captured, inputs.tensors, *inputs.differentiable_tensors(), *captured.parameters
        )
        return captured.collect(inputs.tensors).replace_differentiable(replayed).value()

    def release(self, micro_batch: int) -> None:
        """Let other micro-batches use the graphs of one whose backward has run."""
        for variant, captured in self._held.pop(micro_batch, ()):
            variant.captured.append(captured)

    def reset(self) -> None:
        """Let any micro-batch use all graphs."""
        for micro_batch in list(self._held):
            self.release(micro_batch)

    def _capture(self, layer: nn.Module, inputs: Payload, seeds: Sequence[Tensor | None]) -> _Captured:
        """Capture a layer's forward and, with `seeds` to start from, its backward."""
        # Not one pool for several layers: a tensor that bypasses a layer would lie where that layer's graph writes.
        pool = torch.cuda.graph_pool_handle()
        own = [tensor.detach().clone() for tensor in inputs.tensors]
        norms = {norm: norm.fresh for norm in converted_batch_norms([layer])}
        trained = {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}
        # Leaves of its own. Other micro-batches may be using the parameters: autograd would let their stream wait for
        # the gradient, and no stream may wait for one that is being captured.
        aliases = {name: parameter.detach().requires_grad_() for name, parameter in trained.items()}
        forward, backward = torch.cuda.CUDAGraph(), None
        gradients: Sequence[Tensor | None] = ()
        with self._capturing(forward, pool):
            entered = enter_graph(inputs.replace(own), [])
            # Where gradients arrive: at the inputs as they are now, before the layer may change them.
            sources: list[Any] = [*map(get_gradient_edge, entered.differentiable_tensors()), *aliases.values()]
            versions = [tensor._version for tensor in entered.tensors]
            outputs = Payload.of(functional_call(layer, aliases, (entered.value(),)))
            statistics = _take_statistics(norms)
        refuse_hidden_parameters(outputs, trained)
        if seeds:
            seeds = [None if seed is None else torch.empty_like(seed) for seed in seeds]
            roots = [one for one, seed in zip(outputs.differentiable_tensors(), seeds, strict=True) if seed is not None]
            starts = [seed for seed in seeds if seed is not None]
            backward = torch.cuda.CUDAGraph()
            with self._capturing(backward, pool), without_autocast(self._device.type):
                gradients = torch.autograd.grad(roots, sources, starts, allow_unused=True)
        unchanged = zip(entered.tensors, versions, strict=True)
        places = {id(one): place for place, (one, version) in enumerate(unchanged) if one._version == version}
        passed = [places.get(id(tensor)) for tensor in outputs.tensors]
        parameters = list(trained.values())
        return _Captured(forward, own, outputs.detach(), passed, statistics, backward, seeds, parameters, gradients)

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
        """Capture what the body launches.

        Other threads may go on. Autocast keeps no copies of weights: the next copy would lie elsewhere than the graph
        expects.
        """
        keeps = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    yield
                except BaseException:
                    with suppress(RuntimeError):  # the other error already says that it cannot be captured
                        graph.capture_end()
                    raise
                graph.capture_end()
        except RuntimeError as error:
            raise ValueError(
                f"the layer cannot be captured as a CUDA graph: {error}; avoid waits for the GPU in it (.item(), "
                "shapes that depend on values), or set trainer.cuda_graphs=false"
            ) from error
        finally:
            torch.set_autocast_cache_enabled(keeps)


def _take_statistics(
    noted_before: Mapping[MicroBatchNorm, tuple[Any, ...]],
) -> list[tuple[MicroBatchNorm, Tensor, int]]:
    """Take what batch norms have noted since `noted_before`, and let them forget it."""
    found: list[tuple[MicroBatchNorm, Tensor, int]] = []
    for norm, before in noted_before.items():
        noted = norm.fresh[len(before) :]
        found += [(norm, *pair) for pair in zip(noted[::2], noted[1::2], strict=True)]
        norm.__dict__["fresh"] = before
    return found


def _describe(inputs: Payload, device: torch.device, *, has_backward: bool) -> Hashable:
    """Return what a run of a layer depends on, apart from the layer and the values of its inputs."""
    precision = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    tensors = tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in inputs.tensors)
    return has_backward, is_recomputing(), torch.is_grad_enabled(), precision, inputs.structure, tensors


def _run_plainly(layer: nn.Module, value: Any, variant: _Variant, *, has_backward: bool) -> Any:
    """Run a layer as it is, and let the variant note what its backward starts from."""
    outputs = Payload.of(layer(value))
    outputs.find_shared(outputs)
    if not outputs.shared and not has_backward:
        variant.seeds = []
    wanted = outputs.differentiable_tensors() if has_backward else []
    if not wanted or outputs.shared:
        return outputs.value()
    return outputs.replace_differentiable(apply_function(_Note, variant, *wanted)).value()
