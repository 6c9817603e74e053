"""What a layer costs: FLOPs and bytes described on the meta device, seconds measured on request."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.randomness import preserved_generators
from gpipe.pipeline.shared.tied_parameters import count_tied_parameters

_DESCRIBE_REMEDY = "check the example's shape, or, if the layer looks at values, give partition_layers your own costs"
_TIME_REMEDY = "put the layers and the example on one device"


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer's forward function for one input; a partition's cost is the sum over its layers.

    Attributes:
        flops: FLOPs of the forward function, a multiply-add as 2, counted by torch's FlopCounterMode: matrix products,
            convolutions and attention. All else (activation functions, norms, pools, embeddings) counts 0: it is bound
            by memory, not arithmetic, and small beside a product. Partitioning takes zeros; where time goes into
            what this leaves out, partition by `seconds`.
        parameters: number of parameters, frozen ones too; one that two layers share counts in both, as each gets a
            copy.
        parameter_bytes: bytes of those parameters.
        output_bytes: bytes that would travel over a boundary after the layer; a tensor that occurs twice travels once.
        activation_bytes: bytes that autograd keeps for backward, without parameters and buffers. A storage counts in
            the first layer that keeps it, so that the sum over all layers is what the plain model keeps without
            re-materialisation. A partition's boundary input may be among them.
            On the meta device attention is not fused, and keeps its matrices: planning/profile.py knows better.
        seconds: median forward time; None where it was not measured.
        tied_parameters: how many of the parameters an earlier layer shares: what all parameters exceed the model's by.
    """

    flops: int
    parameters: int
    parameter_bytes: int
    output_bytes: int
    activation_bytes: int
    seconds: float | None = None
    tied_parameters: int = 0


def analyze_layers(layers: nn.Sequential, example: Any) -> list[LayerCost]:
    """Describe every layer in training mode on the meta device: nothing is computed, and no memory is taken.

    The layers, `example` and torch's global generators stay as they are; layers on the meta device are welcome.

    Args:
        layers: the whole model, in order.
        example: an input of the first layer, with the shapes and types of a micro-batch; only those are looked at.

    Raises:
        ValueError: a layer cannot run on the meta device, as one that looks at the values of its input.
    """
    costs = []
    # Storages stay referenced to the end: a freed one's address could come back as another's.
    kept: dict[int, torch.UntypedStorage] = {}
    value = _map_tensors(example, _meta_like)
    with preserved_generators(()), torch.enable_grad():
        for index, layer in enumerate(layers):
            with _blame(index, layer, "cannot be described on the meta device", _DESCRIBE_REMEDY):
                value, cost = _describe(layer, value, kept)
            costs.append(cost)
    counts = count_tied_parameters(layers)
    return [replace(cost, tied_parameters=tied) for cost, tied in zip(costs, counts, strict=True)]


def measure_layers(
    layers: nn.Sequential, example: Any, *, repeats: int = 5, on_layer: Callable[[float], None] | None = None
) -> list[LayerCost]:
    """Describe every layer as `analyze_layers` does and time its forward function in training mode, on a copy.

    Time varies from call to call, and so may a partition by time: all processes of a run must use the numbers of one.

    Args:
        layers: the whole model, in order, on one device.
        example: an input of the first layer, as large as a micro-batch, on that device.
        repeats: number of timed runs a layer, after one that is not timed; the median counts.
        on_layer: called with each layer's seconds as soon as they are known.

    Raises:
        ValueError: `repeats` is below 1, a layer cannot run on the meta device or on the example, or is itself on the
            meta device, where time has no meaning.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; time every layer at least once.")
    costs = analyze_layers(layers, example)
    devices = {tensor.device for tensor in chain(Payload.of(example).tensors, layers.parameters(), layers.buffers())}
    if torch.device("meta") in devices:
        raise ValueError("The layers or the example are on the meta device; move both to a real one to time them.")
    value = example
    with preserved_generators(devices), torch.no_grad():
        for index, layer in enumerate(layers):
            with _blame(index, layer, "cannot be timed on the example", _TIME_REMEDY):
                value, seconds = _time(layer, value, repeats, devices)
            costs[index] = replace(costs[index], seconds=seconds)
            if on_layer is not None:
                on_layer(seconds)
    return costs


def _describe(layer: nn.Module, value: Any, kept: dict[int, torch.UntypedStorage]) -> tuple[Any, LayerCost]:
    layer = _meta_copy(layer)
    not_activations = {tensor.untyped_storage()._cdata for tensor in chain(layer.parameters(), layer.buffers())}
    activation_bytes = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal activation_bytes
        storage = tensor.untyped_storage()
        if storage._cdata not in kept and storage._cdata not in not_activations:
            kept[storage._cdata] = storage
            activation_bytes += storage.nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter, saved_tensors_hooks(keep, lambda tensor: tensor):
        value = layer(value)
    return value, LayerCost(
        flops=counter.get_total_flops(),
        parameters=sum(parameter.numel() for parameter in layer.parameters()),
        parameter_bytes=sum(map(_num_bytes, layer.parameters())),
        output_bytes=sum(map(_num_bytes, Payload.of(value).tensors)),
        activation_bytes=activation_bytes,
    )


def _time(layer: nn.Module, value: Any, repeats: int, devices: set[torch.device]) -> tuple[Any, float]:
    """Return the layer's output and the median seconds of its forward function."""
    layer = copy.deepcopy(layer).train()
    output = layer(_map_tensors(value, Tensor.clone))
    samples = []
    for _ in range(repeats):
        own_value = _map_tensors(value, Tensor.clone)  # the layer may change its input in place
        _synchronize(devices)
        start_seconds = time.perf_counter()
        layer(own_value)
        _synchronize(devices)
        samples.append(time.perf_counter() - start_seconds)
    return output, median(samples)


def _synchronize(devices: set[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _meta_copy(layer: nn.Module) -> nn.Module:
    """Copy a layer so that its parameters and buffers are never copied, only described."""
    memo: dict[int, Any] = {id(buffer): _meta_like(buffer) for buffer in layer.buffers()}
    for parameter in layer.parameters():
        memo[id(parameter)] = nn.Parameter(_meta_like(parameter), requires_grad=parameter.requires_grad)
    return copy.deepcopy(layer, memo).train()


def _meta_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)


def _map_tensors(value: Any, function: Any) -> Any:
    payload = Payload.of(value)
    payload.tensors = [function(tensor) for tensor in payload.tensors]
    return payload.value()


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def _blame(index: int, layer: nn.Module, failure: str, remedy: str) -> Iterator[None]:
    """Turn whatever a layer raises into one sentence that names the layer, the cause and the remedy."""
    try:
        yield
    except Exception as error:
        raise layer_error(f"Layer {index} ({type(layer).__name__})", error, failure, remedy) from error


def layer_error(name: str, error: Exception, failure: str, remedy: str) -> ValueError:
    """Return an error of one sentence that says which layer failed at what, why, and what to do."""
    cause = str(error).strip().partition("\n")[0].rstrip(". ")
    return ValueError(f"{name} {failure} ({type(error).__name__}: {cause}); {remedy}.")
