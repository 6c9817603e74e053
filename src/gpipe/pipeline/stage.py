"""One partition at work: forward, recomputation and backward of its micro-batches (re-materialisation).

    boundary input --> _Entry --> layer i --> layer i+1 --> ... --> boundary output, or the loss
    its gradients  <-- _Entry <-- backward of the layers <-- ... <-- gradients that the next stage sent

Where the schedule splits backwards, gradients of weights follow in a task of their own (layers/split_backward.py).

Between a micro-batch's forward and its backward a stage holds only its boundary input, without a graph. The
recomputation builds the graph above. A micro-batch that is not recomputed keeps the graph of its forward.

A forward that will be recomputed gives the same bits as the recomputation: see layers/first_forward.py.

Why not torch.utils.checkpoint:

- It recomputes inside backward, once the gradient is there. Here recomputation is a task of its own, which the schedule
  puts before the backward: it runs while the gradient is awaited.
- Its forward keeps the outputs and a graph around them. Here both are released once the outputs have been sent.
- It saves and restores the state of generators. Here masks are a function of (seed, step, micro-batch, layer).
- A layer cannot tell a recomputation from a forward, and updates its moving averages and other buffers twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpipe.pipeline._compat import AnyBatchNorm, run_backward
from gpipe.pipeline.batch_norm import MicroBatchNorm, converted_batch_norms, discard, microbatch_phase
from gpipe.pipeline.checks.current_layer import CurrentLayer
from gpipe.pipeline.checks.refusals import refuse_changed_inputs, refuse_changed_later, refuse_unconverted
from gpipe.pipeline.layers.autocast import without_autocast
from gpipe.pipeline.layers.buffers import BufferCopies, Buffers
from gpipe.pipeline.layers.compilation import Compilation
from gpipe.pipeline.layers.cuda_graphs import LayerGraphs
from gpipe.pipeline.layers.entry import enter_graph, find_root
from gpipe.pipeline.layers.first_forward import (
    as_leaves,
    find_differentiable,
    is_same_without_graph,
    wants_no_leaf,
    wants_saved_tensors,
    without_saved_tensors,
)
from gpipe.pipeline.layers.low_precision import lower
from gpipe.pipeline.layers.new_gradients import NewGradients
from gpipe.pipeline.layers.split_backward import WeightGradients, run_split_backward
from gpipe.pipeline.layers.structure import modules_below
from gpipe.pipeline.microbatch import Payload, read_versions
from gpipe.pipeline.nothing import NOTHING
from gpipe.pipeline.randomness import can_draw_from_others, derive_seed, mix_keys, seed_generators
from gpipe.pipeline.step_end.parameter_hooks import ParameterHooks

if TYPE_CHECKING:
    from gpipe.pipeline.checks.recomputation_check import RecomputationCheck
    from gpipe.pipeline.shared.averaging import Averaging
    from gpipe.pipeline.shared.sharding import Sharding
    from gpipe.pipeline.shared.synchronized_norm import StatisticsExchange, SynchronizedMicroBatch

_NO_MICRO_BATCH = -1  # in seeds of what is done once per step, in all replicas alike
MASKS = 0x3A5  # keeps the seeds of dropout and drop-path masks apart from those of initial weights

Loss = Callable[[Any, int], Tensor]
"""(outputs of a micro-batch, its index) -> its weighted share of the mini-batch's loss, a scalar."""

Look = Callable[[int, str, list[Tensor]], None]
"""(a layer's index, its description, its outputs) -> nothing."""


@dataclass(slots=True)
class _Kept:
    """What a stage holds of a micro-batch between its forward and its backward."""

    inputs: Payload
    buffers: BufferCopies  # the buffers that the forward changed, as it found them
    gradients: list[Tensor | None]  # of the differentiable inputs, once backward has run
    roots: list[GradientEdge | None] | None = None  # one per output; None until a graph exists
    loss_gradient: Tensor | None = None  # where backward starts in the last stage; None in others
    is_of_forward: bool = False  # whether the graph is the forward's, not a recomputation's
    synchronized: SynchronizedMicroBatch | None = None  # statistics over all replicas, where batch norms have them
    versions: Sequence[int] = ()  # of the inputs, if a recomputation starts from them


class Stage:
    """A partition bound to a device: some layers, by their index in the model.

    Args:
        layers: of this stage.
        seed: of the run.
        lowered: the indices of the model's layers that want their input in autocast's precision.
        first_micro_batch: the number of this replica's first micro-batch among those of all replicas, for the masks.
        shared_buffers: the full names of buffers that several layers have: no forward may change one.

    Attributes:
        gpu: the device; None if it is the CPU.
        averaging: averages the gradients over the replicas, or shards them; None with one replica.
        exchange: exchanges batch norms' statistics over the replicas; None where they are not synchronised.
        current_layer: the one now running.
        batch_norms: the converted ones of its layers, as the last step found them.
        recomputation_check: compares recomputations with forwards; None compares nothing.
        compilation: runs the layers compiled; None runs them as they are.
        graphs: runs the layers as CUDA graphs; None runs them operation by operation.
        loss: set in the last stage during a training step.
        seeds_host: whether the host's generators are seeded before each layer, as well as the device's.
    """

    def __init__(
        self,
        index: int,
        layers: Mapping[int, nn.Module],
        device: torch.device,
        seed: int,
        lowered: Container[int],
        first_micro_batch: int,
        shared_buffers: Collection[str],
    ) -> None:
        self.index, self.layers, self.device = index, dict(layers), device
        self._device_type = device.type  # reading it from the device takes as long as a small operation
        self.gpu = device if self._device_type == "cuda" else None
        self.averaging: Averaging | Sharding | None = None
        self.exchange: StatisticsExchange | None = None
        self.compilation: Compilation | None = None
        self.graphs: LayerGraphs | None = None
        self.recomputation_check: RecomputationCheck | None = None
        self.loss: Loss | None = None
        self.seeds_host = True
        self._loss_gradient: Tensor | None = None  # where backwards start
        self.seed, self.first_micro_batch = seed, first_micro_batch
        self._lowered = lowered
        self._final_micro_batch = 0
        self._needs_whole_graph = False  # in a forward that will be recomputed
        self._draws_only_from_torch: Mapping[int, bool] = {}  # by layer
        self._is_same_without_graph = False
        self._has_copies = False  # autocast's of this step's weights, with their graphs
        self._buffers = Buffers(self.layers, shared_buffers)
        self._hooks = ParameterHooks()
        self._new_gradients = NewGradients()
        self.batch_norms = converted_batch_norms(self.layers.values())
        discard(self.batch_norms)
        self._kept: dict[int, _Kept] = {}
        self._waiting: dict[int, WeightGradients] = {}
        self.current_layer = CurrentLayer(index)
        self._last = max(self.layers)

    def seed_masks(self, step: int) -> None:
        """Choose the masks of training step number `step`."""
        self._masks = mix_keys(MASKS, self.seed, step)

    def start_step(self, step: int) -> None:
        """Prepare for training step number `step`, with any mini-batch."""
        self.seed_masks(step)
        modules = {i: modules_below(layer) for i, layer in self.layers.items()}  # which may have changed
        self._buffers.start_step(chain(*modules.values()))
        norms = [module for module in chain(*modules.values()) if isinstance(module, AnyBatchNorm)]
        self.batch_norms = [norm for norm in norms if isinstance(norm, MicroBatchNorm)]
        if len(self.batch_norms) < len(norms):
            refuse_unconverted(nn.ModuleDict({str(i): layer for i, layer in self.layers.items()}))
        self._hooks.take(modules)
        self._new_gradients.start_step(chain(*modules.values()))
        self._draws_only_from_torch = {i: not any(map(can_draw_from_others, below)) for i, below in modules.items()}
        is_plain = self.compilation is None and self.exchange is None
        self._is_same_without_graph = is_plain and all(map(is_same_without_graph, modules.values()))
        self._has_copies = False
        if self.averaging is not None:
            self.averaging.start_step()
        if self.graphs is not None:
            self.graphs.start_step()

    def expect(self, loss: Loss | None, final_micro_batch: int) -> None:
        """Note the loss of the step, in the last stage, and the micro-batch whose gradients come last."""
        self.loss, self._final_micro_batch = loss, final_micro_batch

    def use_cuda_graphs(self) -> None:
        """Run the layers as CUDA graphs from the next step on, if the stage is on a GPU."""
        if self.gpu is not None:
            self.graphs = LayerGraphs(self.layers, self.gpu, self._buffers)

    def call_hooks(self) -> None:
        """Call the users' hooks of parameters, once the gradients are those of all replicas."""
        self._hooks.call(lambda i: seed_generators(derive_seed(_NO_MICRO_BATCH, i, state=self._masks), self.gpu))

    def finish_step(self) -> None:
        """Release what the step held: the loss holds the targets."""
        self.loss = self._loss_gradient = None
        self._buffers.finish_step()

    def undo_step(self) -> None:
        """Restore moving averages and other buffers to what they were before the step, and finish it."""
        self._hooks.give_back()
        discard(self.batch_norms)
        self._buffers.undo_step()
        self.finish_step()

    def reset(self) -> None:
        """Drop everything of a step that failed."""
        self._kept.clear()
        self._waiting.clear()
        if self.averaging is not None:
            self.averaging.reset()
        if self.recomputation_check is not None:
            self.recomputation_check.reset()
        if self.graphs is not None:
            self.graphs.reset()
        self.undo_step()

    def forward(self, micro_batch: int, inputs: Payload, *, keep_graph: bool) -> Payload:
        """Run the layers on a micro-batch, with a graph or for a later `recompute`; return the boundary output."""
        try:
            return self._forward(micro_batch, inputs, keep_graph=keep_graph)
        except Exception as error:
            is_graphs = wants_saved_tensors(error) or wants_no_leaf(error)
            if keep_graph or self._needs_whole_graph or not is_graphs:
                raise
        self._needs_whole_graph = True
        for norm in self.batch_norms:
            norm.__dict__["fresh"] = ()
        return self._forward(micro_batch, inputs, keep_graph=False)

    def _forward(self, micro_batch: int, inputs: Payload, *, keep_graph: bool) -> Payload:
        synchronized = self.exchange.start() if self.exchange is not None else None
        norms = self.batch_norms  # without any, a forward is the same as outside a step
        phase = microbatch_phase(norms, recompute=False, synchronized=synchronized) if norms else NOTHING
        with self._buffers.moved(for_recomputation=not keep_graph) as buffers, phase:
            kept = _Kept(inputs, buffers, [None] * sum(inputs.differentiable), synchronized=synchronized)
            self._kept[micro_batch] = kept
            if keep_graph:
                kept.is_of_forward = True
                return self._run_with_graph(micro_batch, kept)
            outputs = self._run_without_graph(micro_batch, inputs)
            kept.versions = [tensor._version for tensor in inputs.tensors]
        if synchronized is not None:
            synchronized.anchors.clear()  # they have graphs
        return outputs

    def recompute(self, micro_batch: int) -> None:
        """Run the forward again from the boundary input, with the same masks, and keep its graph."""
        kept = self._kept[micro_batch]
        refuse_changed_later(kept.inputs, kept.versions)
        if kept.synchronized is not None:
            kept.synchronized.recompute()
        with (
            self._buffers.replaced(kept.buffers),
            microbatch_phase(self.batch_norms, recompute=True, synchronized=kept.synchronized),
        ):
            self._run_with_graph(micro_batch, kept)

    def backward(self, micro_batch: int, gradients: Payload | None, *, splits: bool = False) -> Payload:
        """Add this micro-batch's gradients to the parameters' `.grad`; return those of the boundary input.

        Args:
            micro_batch: one that was kept or recomputed; its graph is released.
            gradients: a tuple with one entry per output of the stage, None for an output without a gradient. In the
                last stage, None instead of the payload.
            splits: leave gradients of weights to `make_weight_gradients`, where that saves time.

        Returns:
            The gradients of the input's tensors, in the same form.
        """
        kept = self._kept.pop(micro_batch)
        averaged = NOTHING if splits or self.averaging is None else self._averaged(micro_batch)
        splits = splits and self.graphs is None  # a graph makes all gradients of a layer at once
        # Checkpoints inside layers recompute in backward.
        if kept.synchronized is not None:
            kept.synchronized.repeat()
        again = microbatch_phase(
            self.batch_norms, recompute=True, synchronized=kept.synchronized, of_forward=kept.is_of_forward
        )
        with self._buffers.replaced(kept.buffers), again, without_autocast(self._device_type), averaged:
            self._run_backward(kept, gradients, micro_batch if splits else None)
        waiting = self._waiting[micro_batch].gradients() if splits else ()
        self._separate_gradients(micro_batch, chain(kept.gradients, gradients.tensors if gradients else (), waiting))
        found = iter(kept.gradients if self.graphs is None else map(_copy, kept.gradients))
        if self.graphs is not None:
            self.graphs.release(micro_batch)
        return Payload.of_gradients(tuple([next(found) if wanted else None for wanted in kept.inputs.differentiable]))

    def make_weight_gradients(self, micro_batch: int) -> None:
        """Add the gradients that a split backward left to the parameters' `.grad`."""
        if self.graphs is not None:
            return  # nothing was left
        waiting = self._waiting.pop(micro_batch)
        with without_autocast(self._device_type), self._averaged(micro_batch, waiting):
            waiting.compute(self.current_layer.note)
        self._separate_gradients(micro_batch, ())

    def _separate_gradients(self, micro_batch: int, held: Iterable[Tensor | None]) -> None:
        if self.averaging is None or micro_batch != self._final_micro_batch:  # averages have memory of their own
            self._new_gradients.separate(held)

    def finish_gradients(self, micro_batch: int) -> None:
        """Start averaging the remaining gradients over the replicas, if this micro-batch's were the last."""
        if self.averaging is not None and micro_batch == self._final_micro_batch:
            self.averaging.reduce_all()

    def _averaged(self, micro_batch: int, waiting: WeightGradients | None = None) -> AbstractContextManager[None]:
        """Average gradients over the replicas if the body makes the last ones; `waiting` are then all that it makes."""
        if self.averaging is None or micro_batch != self._final_micro_batch:
            return NOTHING
        return self.averaging.reducing(None if waiting is None else waiting.parameters())

    def _run_backward(self, kept: _Kept, gradients: Payload | None, splits: int | None) -> None:
        assert kept.roots is not None, "the schedule forgot to recompute"
        self.current_layer.at = (self._last, self.layers[self._last]) if self.loss is None else (self._last + 1, None)
        seeds = [kept.loss_gradient] if gradients is None else gradients.value()
        pairs = [(r, s) for r, s in zip(kept.roots, seeds, strict=True) if r is not None and s is not None]
        if kept.synchronized is not None:
            pairs += [(get_gradient_edge(tensor), None) for tensor in kept.synchronized.anchors]
        if splits is None:
            run_backward([root for root, _ in pairs], [seed for _, seed in pairs])
        else:
            self._waiting[splits] = run_split_backward(pairs, self.current_layer.read)

    def start_evaluation(self, step: int, layers: Mapping[int, nn.Module]) -> None:
        """Prepare to `evaluate` these layers, the stage's own or substitutes, before training step number `step`."""
        self.seed_masks(step)
        self._buffers.find_memory(chain(*map(modules_below, layers.values())))

    def evaluate(self, micro_batch: int, inputs: Payload, layers: Mapping[int, nn.Module], *, moves: bool) -> Payload:
        """Run the layers, within the caller's `torch.no_grad`; return the boundary output.

        moves: whether batch norms in training mode keep their statistics for `moving_statistics.commit`.
        """
        if not moves:
            return self._run(micro_batch, inputs, layers)
        exchange = self.exchange.among(layers) if self.exchange is not None else None
        synchronized = exchange.start() if exchange is not None else None
        norms = converted_batch_norms(layers.values())
        with microbatch_phase(norms, recompute=False, synchronized=synchronized):
            return self._run(micro_batch, inputs, layers)

    def enter_loss(self, micro_batch: int) -> None:
        """Prepare for what follows the last layer; errors then name the loss."""
        self._enter(micro_batch, self._last + 1, None)

    def enter_inputs(self, micro_batch: int) -> None:
        """Prepare for what precedes the first layer; errors then name the preparation of the inputs."""
        self._enter(micro_batch, -1, None)

    def start_probe(self, step: int) -> None:
        """Prepare to `probe` each micro-batch of a training step, in order; `undo_step` ends it."""
        self.seed_masks(step)
        self._buffers.start_step(chain(*map(modules_below, self.layers.values())))

    def probe(self, micro_batch: int, inputs: Payload, look: Look) -> Payload:
        """Run the forward of a training step again, with the same masks, and call `look` after each layer.

        The layers are not compiled, so that `look` sees the outputs of each one.
        """
        synchronized = self.exchange.start() if self.exchange is not None else None
        phase = microbatch_phase(self.batch_norms, recompute=True, synchronized=synchronized)
        with self._buffers.moved(for_recomputation=False), phase:
            return self._run_without_graph(micro_batch, inputs, look)

    def _run_without_graph(self, micro_batch: int, inputs: Payload, look: Look | None = None) -> Payload:
        """Run the layers with the kernels that they use in a graph, but keep no graph."""
        is_stored = look is None
        is_converting = torch.is_autocast_enabled(self._device_type) and torch.is_autocast_cache_enabled()
        if self._is_same_without_graph and (self._has_copies or not is_converting):
            with torch.no_grad():
                return self._run(micro_batch, inputs, self.layers, is_stored=is_stored, has_graph=False, look=look)
        # Leaves are the cheapest start of a graph, but no layer may change one in place.
        is_whole = self._needs_whole_graph or not is_stored
        entered = enter_graph(inputs, []) if is_whole else as_leaves(inputs, as_views=is_converting)
        with NOTHING if is_whole else without_saved_tensors():
            outputs = self._run(micro_batch, entered, self.layers, is_stored=is_stored, look=look).detach()
        self._has_copies = True
        return outputs

    def _run_with_graph(self, micro_batch: int, kept: _Kept) -> Payload:
        outputs = self._run(micro_batch, enter_graph(kept.inputs, kept.gradients), self.layers, announce=True)
        self._has_copies = True
        if self.loss is not None:
            self.enter_loss(micro_batch)
            loss = self.loss(outputs.value(), micro_batch)
            if self._loss_gradient is None:
                self._loss_gradient = torch.ones_like(loss)  # once per step: it takes as long as a small layer
            outputs, kept.loss_gradient = Payload.of(loss), self._loss_gradient
        kept.roots = [find_root(tensor) for tensor in outputs.tensors]
        return outputs

    def _run(
        self,
        micro_batch: int,
        inputs: Payload,
        layers: Mapping[int, nn.Module],
        *,
        is_stored: bool = False,
        has_graph: bool = True,
        announce: bool = False,
        look: Look | None = None,
    ) -> Payload:
        """Run layers one after another.

        is_stored: whether a recomputation will start from the inputs: no layer may change them.
        has_graph: whether a graph says which tensors need a gradient.
        announce: whether their backward will run.
        """
        payload, value = inputs, inputs.value()
        graphs = self.graphs if look is None and (is_stored or announce) else None
        is_guarded = is_stored or (bool(inputs.shared) and not torch.is_inference_mode_enabled())
        versions = [tensor._version for tensor in inputs.tensors] if is_guarded else []
        for index, layer in layers.items():
            if index in self._lowered:
                payload = lower(payload)
                value = payload.value()
            self._enter(micro_batch, index, layer)
            is_announced = announce and (index < self._last or self.loss is not None)
            passed_by = [tensor.grad_fn for tensor in payload.tensors] if is_announced else []
            before = [] if has_graph else read_versions(payload.tensors)
            if graphs is not None:
                value = graphs.run(index, value, micro_batch if announce else None)
            else:
                run = layer if self.compilation is None or look is not None else self.compilation.compiled(layer)
                value = run(value)
            # Taken apart after each layer: what cannot travel is refused no matter where the boundaries are.
            outputs = Payload.of(value)
            if not has_graph:
                outputs.differentiable = find_differentiable(outputs, payload, before, layer)
            payload = outputs
            if is_guarded and [tensor._version for tensor in inputs.tensors] != versions:
                refuse_changed_inputs(inputs, versions, is_stored=is_stored)
            if (check := self.recomputation_check) is not None and look is None and (is_stored or announce):
                (check.note if is_stored else check.compare)(micro_batch, index, payload.tensors)
            if look is not None:
                look(index, f"layer {index} ({type(layer).__name__})", payload.tensors)
            if is_announced:
                self.current_layer.announce_backward(payload, passed_by, index, layer)
        if self._last + 1 in self._lowered:  # the next stage's first layer
            payload = lower(payload)
        payload = self._buffers.copy_out(payload)
        payload.find_shared(inputs)
        # A CUDA graph's next replay overwrites its outputs, which the next stage or the loss still needs.
        return payload if graphs is None else payload.replace([tensor.clone() for tensor in payload.tensors])

    def _enter(self, micro_batch: int, index: int, layer: nn.Module | None) -> None:
        self.current_layer.at = (index, layer)
        seed = derive_seed(self.first_micro_batch + micro_batch, index, state=self._masks)
        others = not self._draws_only_from_torch.get(index)
        seed_generators(seed, self.gpu, host=self.seeds_host, others=others)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
