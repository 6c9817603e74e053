"""Give a layer that was described on the meta device its memory and its initial weights, seeded by its index."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gpipe.pipeline.layers.generators import preserved_generators
from gpipe.pipeline.randomness import derive_seed, seed_generators

_CPU = torch.device("cpu")
INITIALIZATION = 0x1A1  # keeps the seeds of initial weights apart from those of the masks


def is_meta(module: nn.Module) -> bool:
    """Return whether some parameter or buffer of the module has no memory yet."""
    return any(tensor.is_meta for tensor in itertools.chain(module.parameters(), module.buffers()))


def materialize(
    layer: nn.Module, index: int, seed: int, device: torch.device, given: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """Put a layer on `device`; if it was described on the meta device, draw its initial weights first.

    They are a function of (seed, index). Each submodule's own `reset_parameters` draws them, always on the CPU and
    children before their parent, as when they were constructed. The global generators are restored.

    Args:
        layer: changed in place.
        index: the layer's position in the whole model.
        seed: of the run.
        device: where the layer will compute.
        given: values of some parameters, by name, which replace those that are drawn.

    Raises:
        ValueError: a submodule has parameters or buffers of its own, but no `reset_parameters` to fill them all; or
            only part of the layer is on the meta device.
    """
    if is_meta(layer):
        name = f"layers.{index}"
        for key, tensor in itertools.chain(layer.named_parameters(), layer.named_buffers()):
            if not tensor.is_meta:
                raise ValueError(
                    f"{name}.{key} has memory, but other tensors of {name} are on the meta device, and drawing their "
                    "initial weights would overwrite it; describe all of it on the meta device, or build it on the CPU"
                )
        _to_empty(layer)
        with preserved_generators([_CPU]), torch.no_grad(), _CPU:
            for tensor in itertools.chain(layer.parameters(), layer.buffers()):
                tensor.fill_(_find_mark(tensor))
            seed_generators(derive_seed(INITIALIZATION, seed, index))
            values = {layer.get_parameter(key): value for key, value in (given or {}).items()}
            _reset(layer, name, values)
            for parameter, value in values.items():
                parameter.copy_(value)
            _refuse_unfilled(layer, name)
    return layer.to(device)


def replace_parameter(layer: nn.Module, old: Parameter, new: Parameter) -> None:
    """Replace `old` by `new` everywhere in a layer."""
    for module, name in _find_uses(layer)[old]:
        setattr(module, name, new)


def _find_uses(layer: nn.Module) -> dict[Parameter, list[tuple[nn.Module, str]]]:
    """Return the modules that use each parameter of a layer, and its names there."""
    uses: dict[Parameter, list[tuple[nn.Module, str]]] = {}
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                uses.setdefault(parameter, []).append((module, name))
    return uses


def _to_empty(layer: nn.Module) -> None:
    """Give a layer memory on the CPU; unlike with torch's `to_empty`, a parameter in several places stays one."""
    uses = _find_uses(layer)
    layer.to_empty(device=_CPU)
    for (module, name), *others in uses.values():
        for other, other_name in others:
            setattr(other, other_name, module._parameters[name])


def _reset(module: nn.Module, name: str, given: Container[Tensor]) -> None:
    for child_name, child in module.named_children():
        _reset(child, f"{name}.{child_name}", given)
    # torch.nn.MultiheadAttention spells it with an underscore.
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None:
        reset()
    elif any(t not in given for t in itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))):
        raise ValueError(
            f"{name} ({type(module).__name__}) was described on the meta device and has no reset_parameters() to fill "
            "its tensors; give it one, or build the model on the CPU"
        )


def _find_mark(tensor: Tensor) -> float:
    """Return a number by which a tensor that nothing fills is noticed."""
    if tensor.is_floating_point() or tensor.is_complex():
        return math.nan
    return True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max


def _refuse_unfilled(layer: nn.Module, name: str) -> None:
    for key, tensor in itertools.chain(layer.named_parameters(), layer.named_buffers()):
        mark = _find_mark(tensor)
        # Whole numbers may be the mark by intention; then they have been written once more.
        is_whole = not math.isnan(mark) and tensor._version == 1 and tensor.numel() > 0
        if bool((tensor == mark).all()) if is_whole else bool(tensor.isnan().any()):
            raise ValueError(
                f"{name}.{key} was described on the meta device, and no reset_parameters() filled it; let that of "
                "its module fill it, or build the model on the CPU"
            )
