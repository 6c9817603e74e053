"""How long a device takes for each layer: forward, recomputation, backward and update, measured one after the other."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable, Iterable
from statistics import median
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from gpipe.pipeline.batch_norm import converted_batch_norms, microbatch_phase
from gpipe.pipeline.initialization import materialize
from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.randomness import preserved_generators
from gpipe.planning.repeats import structure
from gpipe.planning.speed import LayerSeconds

_Result = TypeVar("_Result")
MakeOptimizer: TypeAlias = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class LayerTiming(NamedTuple):
    """Median seconds of one layer, or the loss, with one micro-batch; the update's do not depend on its size."""

    forward: float
    recompute: float
    backward: float
    update: float

    @property
    def seconds(self) -> LayerSeconds:
        """What a simulation takes."""
        return LayerSeconds(self.forward, self.recompute, self.backward)


class LayerTimer:
    """Times layers that are described on the meta device; one at a time gets memory, so that a giant can be timed.

    Layers that are equal and have equal inputs are timed once, also of different models.

    Args:
        device: that computes; a CPU with one thread, whose time is counted.
        repeats: runs that count, after one that does not.
        make_optimizer: (names and parameters of a layer) -> whose update is timed.
    """

    def __init__(self, device: torch.device, repeats: int, make_optimizer: MakeOptimizer) -> None:
        if repeats < 1:
            raise ValueError(f"repeats is {repeats}, expected 1 or more: time every layer at least once.")
        self._device, self._repeats, self._make_optimizer = device, repeats, make_optimizer
        self._known: dict[Hashable, tuple[LayerTiming, Payload]] = {}

    def time(
        self, layers: nn.Sequential, loss: Callable[[Any, Any], Any], example: tuple[Any, Any]
    ) -> list[LayerTiming]:
        """Return the timings of each layer in training mode, and after them the loss.

        Args:
            layers: the whole model, on the meta device; it stays there.
            loss: as for `Pipeline`.
            example: (inputs, targets) of a micro-batch, on the device.
        """
        payload, targets = Payload.of(example[0]), example[1]
        found: list[LayerTiming] = []
        with preserved_generators([self._device]):
            for index, layer in enumerate(layers):
                shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in payload.tensors)
                key = structure(layer), shapes
                if key not in self._known:
                    self._known[key] = self._time_layer(layer, index, payload)
                timing, payload = self._known[key]
                found.append(timing)
            found.append(self._time(lambda logits: _loss_alone(loss(logits, targets)), payload, None)[0])
        return found

    def _time_layer(self, layer: nn.Module, index: int, inputs: Payload) -> tuple[LayerTiming, Payload]:
        real = materialize(copy.deepcopy(layer), index, 0, self._device).train()
        with microbatch_phase(converted_batch_norms([real]), recompute=True):  # the statistics are nobody's
            return self._time(real, inputs, self._make_optimizer(real.named_parameters()))

    def _time(
        self, run: Callable[[Any], Any], inputs: Payload, optimizer: torch.optim.Optimizer | None
    ) -> tuple[LayerTiming, Payload]:
        rounds = [self._round(run, inputs, optimizer) for _ in range(self._repeats + 1)][1:]
        timings = LayerTiming(*map(median, zip(*(timing for timing, _ in rounds), strict=True)))
        return timings, rounds[-1][1]

    def _round(
        self, run: Callable[[Any], Any], inputs: Payload, optimizer: torch.optim.Optimizer | None
    ) -> tuple[LayerTiming, Payload]:
        """Run all passes once; return their seconds, and the outputs without a graph."""
        with torch.no_grad():
            forward, outputs = self._clocked(lambda: Payload.of(run(inputs.value())))
        leaves = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs.tensors]
        entered = Payload(leaves, inputs.structure, [leaf.requires_grad for leaf in leaves]).value()
        recompute, graph = self._clocked(lambda: Payload.of(run(entered)))
        roots = [tensor for tensor in graph.tensors if tensor.requires_grad]
        gradients = [torch.ones_like(root) for root in roots]
        backward, _ = self._clocked(lambda: torch.autograd.backward(roots, gradients))
        update = 0.0 if optimizer is None else self._clocked(optimizer.step)[0]
        return LayerTiming(forward, recompute, backward, update), outputs

    def _clocked(self, run: Callable[[], _Result]) -> tuple[float, _Result]:
        start = self._now()
        result = run()
        return self._now() - start, result

    def _now(self) -> float:
        """Return the time in seconds: on a CPU that of this process, which others on the machine do not lengthen."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return time.perf_counter()
        return time.process_time()


def _loss_alone(found: Any) -> Tensor:
    """Return the loss where the function gives metrics too."""
    loss: Tensor = found[0] if isinstance(found, tuple) else found
    return loss
