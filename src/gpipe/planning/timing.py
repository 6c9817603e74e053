"""Measure how long a device takes for each layer, one after another: forward, recomputation, backward and update."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gpipe._compat.flop_counts import FlopCounter
from gpipe.pipeline.batch_norm import MicroBatchNorm, converted_batch_norms, discard, microbatch_phase
from gpipe.pipeline.checks.refusals import refuse_no_sequence
from gpipe.pipeline.job.activity import Activity
from gpipe.pipeline.layers.compilation import Compilation
from gpipe.pipeline.layers.first_forward import is_same_without_graph, wants_saved_tensors, without_saved_tensors
from gpipe.pipeline.layers.generators import preserved_generators
from gpipe.pipeline.layers.initialization import materialize
from gpipe.pipeline.layers.split_backward import run_split_backward
from gpipe.pipeline.layers.structure import structure
from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.step_end.gradient_norm import compute_norms
from gpipe.pipeline.step_end.moving_statistics import commit
from gpipe.pipeline.wire.format import count_bytes
from gpipe.planning.accelerator import LayerSeconds
from gpipe.planning.errors import layer_error
from gpipe.planning.profile import LayerCost, analyze_layers, count_tied_parameters

# Size of the caches nearest to arithmetic. In training, other layers run between two runs of a layer; without that,
# small cells of AmoebaNet look a tenth too fast.
_CACHE_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
_Result = TypeVar("_Result")
MakeOptimizer: TypeAlias = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class LayerTiming(NamedTuple):
    """Median seconds of one layer, or the loss, with one micro-batch.

    Attributes:
        seconds: of its tasks; the forward is one that will be recomputed.
        update: of the end of a step, which does not depend on the size of micro-batches: the norms of the gradients,
            the moving averages of batch norms, and the optimiser's update if there is one.
    """

    seconds: LayerSeconds
    update: float = 0.0


def measure_layers(
    layers: nn.Sequential, example: Any, *, repeats: int = 5, on_layer: Callable[[float], None] | None = None
) -> list[LayerCost]:
    """Describe every layer as `analyze_layers` does, and time its forward function in training mode, on a copy.

    Times vary from call to call, and so may a partition by time: all processes of a run must use one process's numbers.
    Identical layers with equal inputs are timed once. Layers that read the values of their input, such as those that
    route each example, are described by what they compute for this example.

    Args:
        layers: the whole model, in order, on one device.
        example: an input of the first layer, as large as a micro-batch, on that device. It may be marked with
            `gpipe.split_along` and `gpipe.replicated`.
        repeats: the number of timed runs per layer, after one that is not timed; the median counts.
        on_layer: called with each layer's seconds as soon as they are known.

    Raises:
        TypeError: the layers are not an nn.Sequential.
        ValueError: `repeats` is below 1, a layer cannot run on the example, or something is on the meta device, where
            time has no meaning.
    """
    refuse_no_sequence(layers)
    tensors = chain(Payload.of_mini_batch(example)[0].tensors, layers.parameters(), layers.buffers())
    devices = {tensor.device for tensor in tensors}
    if torch.device("meta") in devices:
        raise ValueError("The layers or the example are on the meta device; move both to a real one to time them.")
    timer = LayerTimer(next(iter(devices)), repeats)
    try:
        costs = analyze_layers(layers, example)
    except ValueError as error:
        costs = _describe_with_data(layers, example, error)

    def tell(timing: LayerTiming) -> None:
        if on_layer is not None:
            on_layer(timing.seconds.forward)

    timings = timer.time(layers, None, (example, None), tell)
    return [replace(cost, seconds=timing.seconds.forward) for cost, timing in zip(costs, timings, strict=True)]


def _describe_with_data(layers: nn.Sequential, example: Any, failure: ValueError) -> list[LayerCost]:
    """Describe layers by running a copy of each.

    Raises:
        ValueError: a layer does not run; the error is `failure`, that of describing them without data.
    """
    payload, _ = Payload.of_mini_batch(example)
    costs = []
    with preserved_generators({tensor.device for tensor in payload.tensors}), torch.enable_grad():
        for layer, tied in zip(layers, count_tied_parameters(layers)[:-1], strict=True):
            try:
                real = copy.deepcopy(layer).train()
                with FlopCounter() as counter, microbatch_phase(converted_batch_norms([real]), recompute=True):
                    payload = Payload.of(real(payload.value())).detach()
            except Exception:  # noqa: BLE001 - the first error tells what is wrong
                raise failure from failure.__cause__
            parameters = list(layer.parameters())
            costs.append(
                LayerCost(
                    counter.total,
                    sum(parameter.numel() for parameter in parameters),
                    sum(parameter.nbytes for parameter in parameters),
                    sum(map(count_bytes, payload.tensors)),
                    tied_parameters=tied,
                )
            )
    return costs


class LayerTimer:
    """Times layers one at a time. Those on the meta device get memory one at a time, so that a giant can be timed.

    Equal layers with equal inputs are timed once, even in different models.

    Args:
        device: where the layers run. On a CPU with one thread, this process's CPU time is measured, which other
            processes on the machine do not lengthen.
        repeats: the number of runs that count, after one that does not.
        make_optimizer: (named parameters of a layer) -> the optimiser whose update is timed; None times no update.
        splits: time the two parts of a split backward too.
        memory_format: of the layers' weights.
        compile_options: of torch.compile; None times the layers as they are.
    """

    def __init__(
        self,
        device: torch.device,
        repeats: int,
        make_optimizer: MakeOptimizer | None = None,
        *,
        splits: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        compile_options: Mapping[str, Any] | None = None,
    ) -> None:
        if repeats < 1:
            raise ValueError(f"repeats is {repeats}, expected 1 or more: time every layer at least once.")
        self._device, self._repeats, self._make_optimizer = device, repeats, make_optimizer
        self._splits, self._memory_format, self._compile_options = splits, memory_format, compile_options
        self._known: dict[Hashable, tuple[LayerTiming, Payload]] = {}

    def time(
        self,
        layers: nn.Sequential,
        loss: Callable[[Any, Any], Any] | None,
        example: tuple[Any, Any],
        on_layer: Callable[[LayerTiming], None] = lambda _: None,
    ) -> list[LayerTiming]:
        """Return the timing of each layer in training mode, and then of the loss if it is given.

        Args:
            layers: the whole model, on the device or the meta device; it is not changed.
            loss: as for `Pipeline`.
            example: (inputs, targets) of a micro-batch, on the device.
            on_layer: called with each layer's timing as soon as it is known.

        Raises:
            ValueError: a layer cannot run on the example.
        """
        payload, targets = Payload.of_mini_batch(example[0])[0], example[1]
        found: list[LayerTiming] = []
        seen: set[nn.Parameter] = set()  # their values would be drawn by an earlier layer
        with preserved_generators([self._device]):
            for index, layer in enumerate(layers):
                shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in payload.tensors)
                key = structure(layer), shapes
                if key not in self._known:
                    own = layer.named_parameters()  # time does not depend on their values
                    given = {name: torch.full_like(tied, 0.01, device="cpu") for name, tied in own if tied in seen}
                    self._known[key] = self._time_layer(layer, index, payload, given)
                seen.update(layer.parameters())
                timing, payload = self._known[key]
                found.append(timing)
                on_layer(timing)
            if loss is not None:
                found.append(self._time(lambda logits: _drop_metrics(loss(logits, targets)), payload)[0])
        return found

    def _time_layer(
        self, layer: nn.Module, index: int, inputs: Payload, given: dict[str, Tensor]
    ) -> tuple[LayerTiming, Payload]:
        real = materialize(copy.deepcopy(layer), index, 0, self._device, given).train()
        real.to(memory_format=self._memory_format)  # type: ignore[call-overload]  # the stub lacks it
        optimizer = None if self._make_optimizer is None else self._make_optimizer(real.named_parameters())
        run: Callable[[Any], Any] = real
        if self._compile_options is not None:
            run = Compilation({index: real}, index + 1, Activity(), bool, self._compile_options).compiled(real)
        norms = converted_batch_norms([real])
        try:
            return self._time(run, inputs, norms, lambda: _end_step(real, norms, optimizer))
        except Exception as error:
            name, remedy = f"Layer {index} ({type(layer).__name__})", "put the layers and the example on one device"
            raise layer_error(name, error, "cannot be timed on the example", remedy) from error

    def _time(
        self,
        run: Callable[[Any], Any],
        inputs: Payload,
        norms: Sequence[MicroBatchNorm] = (),
        end_step: Callable[[], None] | None = None,
    ) -> tuple[LayerTiming, Payload]:
        """Return the medians of the rounds that count, and the outputs without a graph.

        norms: the batch norms that run, whose statistics are discarded.
        """
        rounds = []
        for _ in range(self._repeats + 1):
            try:
                with microbatch_phase(norms, recompute=False):
                    forward = self._run_forward(run, inputs)
                with microbatch_phase(norms, recompute=True):
                    passes, outputs = self._run_again(run, inputs)
                rounds.append((forward, *passes, 0.0 if end_step is None else self._clock(end_step)[0]))
            finally:
                discard(norms)
        *medians, update = map(median, zip(*rounds[1:], strict=True))
        return LayerTiming(LayerSeconds(*medians), update), outputs

    def _run_forward(self, run: Callable[[Any], Any], inputs: Payload) -> float:
        """Run a forward as `Stage.forward` does for a later recomputation; return its seconds."""
        is_plain = isinstance(run, nn.Module) and is_same_without_graph(list(run.modules()))
        needs_graph = torch.is_autocast_enabled(self._device.type) or not is_plain
        try:
            with without_saved_tensors() if needs_graph else torch.no_grad():
                return self._time_forward(run, inputs)[0]
        except Exception as error:
            if not wants_saved_tensors(error):
                raise
        return self._time_forward(run, inputs)[0]

    def _run_again(
        self, run: Callable[[Any], Any], inputs: Payload
    ) -> tuple[tuple[float, float, float, float], Payload]:
        """Recompute and run the backward; return the last seconds of LayerSeconds, and the outputs without a graph."""
        recompute, payload = self._time_forward(run, inputs)
        graph, outputs = payload.tensors, payload.detach()
        roots = [tensor for tensor in graph if tensor.requires_grad]
        gradients = [torch.ones_like(root) for root in roots]
        backward, _ = self._clock(lambda: torch.autograd.backward(roots, gradients) if roots else None)
        weights = splitting = 0.0
        if self._splits:
            graph = self._time_forward(run, inputs)[1].tensors
            edges = [get_gradient_edge(tensor) for tensor in graph if tensor.requires_grad]
            del graph, payload, roots  # a boundary output is freed once it has been sent
            early, waiting = self._clock(lambda: run_split_backward(list(zip(edges, gradients, strict=True))))
            weights, _ = self._clock(waiting.compute)
            splitting = early + weights - backward
        return (recompute, backward, weights, splitting), outputs

    def _time_forward(self, run: Callable[[Any], Any], inputs: Payload) -> tuple[float, Payload]:
        """Run the forward function; return its seconds, and the outputs.

        Each pass gets its own inputs, which the layer may change in place: so they are clones of the leaves.
        """
        leaves = [
            tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(inputs.tensors, inputs.differentiable, strict=True)
        ]
        entered = inputs.replace([leaf.clone() for leaf in leaves])
        return self._clock(lambda: Payload.of(run(entered.value())))

    def _clock(self, run: Callable[[], _Result]) -> tuple[float, _Result]:
        cool_caches(self._device)
        start = self._read_clock()
        result = run()
        return self._read_clock() - start, result

    def _read_clock(self) -> float:
        """Return the time in seconds."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._device.type == "cuda" or torch.get_num_threads() > 1:
            return time.perf_counter()
        return time.process_time()


def cool_caches(device: torch.device) -> None:
    """Empty the caches nearest to arithmetic, as the layers of a run do to each other."""
    torch.zeros(_CACHE_BYTES[device.type] // 4, device=device)


def _end_step(layer: nn.Module, norms: Sequence[MicroBatchNorm], optimizer: torch.optim.Optimizer | None) -> None:
    compute_norms(layer.named_parameters())
    commit(norms)
    if optimizer is not None:
        optimizer.step()


def _drop_metrics(found: Any) -> Any:
    """Return the loss, also if the function returns metrics too."""
    return found[0] if isinstance(found, tuple) else found
