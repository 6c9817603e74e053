"""The one description of a layer: what it computes in a step with a micro-batch, and what it keeps in memory.

The whole model runs forward and backward on tensors that have shapes but no data (torch's FakeTensorMode). So a giant
is described in seconds, and nothing is allocated. A partition's figures are sums over its layers: see memory.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gpipe._compat.fake_tensors import QuickFakeTensorMode
from gpipe.pipeline.batch_norm import converted_batch_norms, microbatch_phase
from gpipe.pipeline.checks.refusals import refuse_no_sequence
from gpipe.pipeline.layers.generators import preserved_generators
from gpipe.pipeline.layers.split_backward import CACHE_BYTES
from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.shared.tied_parameters import TiedParameters
from gpipe.planning.ledger import Ledger, Work
from gpipe.planning.observed_model import Arrival, Input, ObservedModel, PerPass, WaitingGradient
from gpipe.planning.operation_memory import OperationMemory
from gpipe.planning.repeats import Shortened
from gpipe.planning.without_data import copy_layers, copy_payload


@dataclass(frozen=True)
class LayerProfile:
    """One layer, or the loss, with a micro-batch; bytes are of tensors, peaks are above what was held before.

    Attributes:
        parameters: their number, including frozen ones.
        parameter_bytes: the size of its parameters.
        trainable_sizes: the size of each parameter that gets a gradient.
        buffer_bytes: the size of its buffers.
        statistics_bytes: what its batch norms note per micro-batch until the step ends.
        forward: the work of each operation of the forward function.
        backward: likewise of the backward pass.
        weight_gradients: the part of that work that a split backward defers.
        deferred_bytes: what it holds until then.
        waiting_gradients: what each of its products makes then, in the order of a backward.
        input_bytes: the size of its input from the layer before, as the plain model holds it.
        boundary_bytes: the size of its input as it would travel over a boundary: of views, only what they show.
        inputs: the tensors of its input, except those that outlive the step.
        arrivals: the gradients that its backward, and those of later layers, give the layers before.
        kept_bytes: how much the graph of the plain model grows over it, less what it frees of earlier layers.
        heights: what was held at every moment of each pass; the peak is the largest. With other numbers of examples,
            another moment may be the largest.
        tied_parameters: how many of its parameters an earlier layer has too; each layer has its own copy.
        converted_bytes: the copies of its weights that autocast makes once per step; nothing else here counts them.
    """

    parameters: int
    parameter_bytes: int
    trainable_sizes: tuple[int, ...]
    buffer_bytes: int
    statistics_bytes: int
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    weight_gradients: tuple[Work, ...]
    deferred_bytes: int
    waiting_gradients: tuple[WaitingGradient, ...]
    input_bytes: int
    boundary_bytes: int
    inputs: tuple[Input, ...]
    arrivals: tuple[Arrival, ...]
    kept_bytes: int
    heights: PerPass[tuple[int, ...]] = field(repr=False)
    tied_parameters: int = 0
    converted_bytes: int = 0

    @cached_property
    def peaks(self) -> PerPass[int]:
        """The most bytes in each pass."""
        return PerPass(*map(max, self.heights))

    @cached_property
    def trainable_bytes(self) -> int:
        """The size of the parameters that get a gradient."""
        return sum(self.trainable_sizes)

    @cached_property
    def waiting_bytes(self) -> int:
        """The size of the parameters' gradients that a split backward defers."""
        return sum(gradient.final_size for gradient in self.waiting_gradients)

    @cached_property
    def weights_peaks(self) -> tuple[int, int]:
        """The peaks of making these gradients: when the parameters already have gradients, and for the first time.

        Gradients under autocast go through autograd, which converts them, up to `CACHE_BYTES` together.
        """
        made = converted = stay = peak = first_peak = 0
        for gradient in self.waiting_gradients:
            peak = max(peak, made + gradient.peak_bytes)
            first_peak = max(first_peak, stay + made + gradient.peak_bytes)
            if gradient.is_added:
                stay += gradient.size
                continue
            made += gradient.size
            converted += gradient.final_size
            peak, first_peak = max(peak, made + converted), max(first_peak, stay + made + converted)
            if made > CACHE_BYTES:
                stay += converted
                made = converted = 0
        return peak, first_peak

    @cached_property
    def forward_flops(self) -> int:
        """FLOPs of the forward function, a multiply-add as 2: of matrix products, convolutions and attention."""
        return sum(work.flops for work in self.forward)

    @cached_property
    def backward_flops(self) -> int:
        """FLOPs of the backward pass."""
        return sum(work.flops for work in self.backward)

    def with_boundary(self, share: float) -> LayerProfile:
        """Return the profile with a share of the bytes that travel over a boundary before the layer, both ways."""
        arrivals = tuple(one._replace(size=int(share * one.size)) for one in self.arrivals)
        return replace(self, boundary_bytes=int(share * self.boundary_bytes), arrivals=arrivals)

    @property
    def returned_bytes(self) -> int:
        """The size of the gradients of its input as they would travel over a boundary."""
        return sum(arrival.size for arrival in self.arrivals)


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer's forward function for one input; a partition's cost is the sum over its layers.

    Attributes:
        flops: FLOPs of the forward function, a multiply-add as 2: of matrix products, convolutions and attention. All
            else (activation functions, norms, pools, embeddings) counts 0: it is bound by memory, not arithmetic, and
            small beside a product. Partitioning accepts zeros; if these operations take much time, partition by
            `seconds`.
        parameters: the number of parameters, including frozen ones; one that two layers share counts in both, as each
            gets a copy.
        parameter_bytes: the size of those parameters.
        output_bytes: bytes that would travel over a boundary after the layer; a tensor that occurs twice travels once.
        seconds: median forward time; None if it was not measured.
        tied_parameters: how many of its parameters an earlier layer has too; the model has them only once.
    """

    flops: int
    parameters: int
    parameter_bytes: int
    output_bytes: int
    seconds: float | None = None
    tied_parameters: int = 0


def analyze_layers(layers: nn.Sequential, example: Any) -> list[LayerCost]:
    """Describe every layer in training mode, without computing or allocating anything.

    The layers, `example` and torch's global generators stay as they are; layers may be on the meta device.

    Args:
        layers: the whole model, in order.
        example: an input of the first layer, with the shapes and types of a micro-batch; only those are read. It may be
            marked with `gpipe.split_along` and `gpipe.replicated`.

    Raises:
        TypeError: the layers are not an nn.Sequential.
        ValueError: a layer cannot be described without data, for example because it reads the values of its input.
    """
    refuse_no_sequence(layers)
    profiles = profile_layers(layers, _sum_outputs, (example, None))
    return [
        LayerCost(
            profile.forward_flops,
            profile.parameters,
            profile.parameter_bytes,
            following.boundary_bytes,
            tied_parameters=profile.tied_parameters,
        )
        for profile, following in pairwise(profiles)
    ]


def _sum_outputs(outputs: Any, _: Any) -> Tensor:
    """Replace the loss of a model that is given without one."""
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
    """Describe each layer, and then the loss; nothing is computed or allocated.

    The layers, the example and torch's global generators stay as they are.

    Args:
        layers: the whole model, in order, on any device.
        loss: as for `Pipeline`.
        example: (inputs, targets) of a micro-batch; only shapes and types are read.
        autocast: makes the context in which the layers run, for the "cpu" type of device.
        measured: runs operations of the layers on this machine's CPU, to plan the memory that they take internally
            there; None leaves that out.
        training: whether the layers are in training mode; otherwise in evaluation mode and without graphs: then what a
            profile says about graphs and backward has no meaning.

    Raises:
        ValueError: a layer cannot be described without data, for example because it reads the values of its input.
    """
    describe = partial(_profile, loss, example, autocast, measured, training)
    shortened = Shortened.of(layers)
    whole = shortened.expand(describe(shortened.layers)) or describe(list(layers))
    counts = count_tied_parameters(layers)
    # Equal layers share their profile.
    return [replace(one, tied_parameters=tied) if tied else one for one, tied in zip(whole, counts, strict=True)]


def count_tied_parameters(layers: nn.Sequential) -> list[int]:
    """Count, for each layer and the loss, the parameters that an earlier layer has too: the model has them once."""
    counts = [0] * (len(layers) + 1)
    for _, *others in TiedParameters(layers).groups:
        for member in others:
            counts[member.layer] += layers[member.layer].get_parameter(member.name).numel()
    return counts


def _profile(
    loss: Callable[[Any, Any], Any],
    example: tuple[Any, Any],
    autocast: Callable[[], AbstractContextManager[Any]],
    measured: OperationMemory | None,
    training: bool,
    layers: Sequence[nn.Module],
) -> list[LayerProfile]:
    with QuickFakeTensorMode(), preserved_generators(()), torch.device("cpu"):
        copies, constants = copy_layers(layers)
        fakes = nn.ModuleList(copies).train(training)
        with autocast():
            converted = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        ledger = Ledger(chain(fakes.parameters(), fakes.buffers(), constants), measured, converted)
        model = ObservedModel(fakes, loss, ledger)
        for parameter in fakes.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(model.let_go)
        inputs, targets = (copy_payload(part) for part in example)
        with model.ledger, microbatch_phase(converted_batch_norms(fakes), recompute=True):
            model.ledger.hold(targets.tensors)
            if training:
                with autocast(), torch.enable_grad():
                    model.forward_quietly(inputs.value(), targets.value())
            start = model.ledger.live_bytes
            with autocast(), torch.set_grad_enabled(training):
                value = model.forward(inputs.value(), targets.value(), "forward")
            if training:
                model.backward(value)
            else:
                model.heights["quiet"] = model.heights["forward"]
    return [_make_profile(model, index, start) for index in range(len(layers) + 1)]


def _make_profile(model: ObservedModel, index: int, start: int) -> LayerProfile:
    layer = model.layers[index]
    parameters = [] if layer is None else list(layer.parameters())
    norms = [] if layer is None else converted_batch_norms([layer])
    before = model.live_after[index - 1] if index > 0 else start
    return LayerProfile(
        parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=sum(parameter.nbytes for parameter in parameters),
        trainable_sizes=tuple(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        buffer_bytes=0 if layer is None else sum(buffer.nbytes for buffer in layer.buffers()),
        statistics_bytes=sum(buffer.nbytes for norm in norms for buffer in norm.buffers() if buffer.ndim > 0),
        forward=model.work["forward"][index],
        backward=model.work["backward"][index],
        weight_gradients=tuple(model.weight_gradients[index]),
        deferred_bytes=sum(size for _, size in model.deferred[index]),
        waiting_gradients=tuple(model.waiting_gradients[index]),
        input_bytes=model.input_bytes[index],
        boundary_bytes=model.boundary_bytes[index],
        inputs=tuple(model.inputs[index]),
        arrivals=tuple(model.arrivals[index]),
        kept_bytes=model.live_after[index] - before,
        heights=PerPass(*(tuple(found[index]) for found in model.heights.values())),
        converted_bytes=model.converted_bytes[index],
    )
