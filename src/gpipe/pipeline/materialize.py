"""Give a layer that was described on the meta device its memory and its initial weights."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from gpipe.pipeline.randomness import derive_seed, preserved_generators, seed_generators

_CPU = torch.device("cpu")
INITIALIZATION = 0x1A1  # keeps the seeds of initial weights apart from those of the masks


def is_meta(module: nn.Module) -> bool:
    """Return whether some parameter or buffer of the module has no memory yet."""
    return any(tensor.is_meta for tensor in itertools.chain(module.parameters(), module.buffers()))


def materialize(layer: nn.Module, index: int, seed: int, device: torch.device) -> nn.Module:
    """Put a layer on `device`; if it was described on the meta device, draw its initial weights first.

    They are a function of (seed, index): drawn on the CPU, whatever the device, by each submodule's own
    `reset_parameters`. The global generators are left as they were.

    Args:
        layer: changed in place.
        index: the layer's position in the whole model.

    Raises:
        ValueError: a submodule has parameters or buffers of its own, but no `reset_parameters` to fill them.
    """
    if is_meta(layer):
        layer.to_empty(device=_CPU)
        with preserved_generators([_CPU]), torch.no_grad():
            seed_generators(derive_seed(INITIALIZATION, seed, index), _CPU)
            for name, module in layer.named_modules():
                _reset(module, f"layers.{index}.{name}".rstrip("."))
    return layer.to(device)


def _reset(module: nn.Module, name: str) -> None:
    # torch.nn.MultiheadAttention spells it with an underscore.
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None:
        reset()
    elif any(True for _ in itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))):
        raise ValueError(
            f"{name} ({type(module).__name__}) was described on the meta device and has no reset_parameters() to fill "
            "its tensors; give it one, or build the model on the CPU"
        )
