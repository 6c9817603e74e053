"""The global norm of the gradients, the same to the last bit for every number of stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_


def compute_norms(named_parameters: Iterable[tuple[str, Tensor]]) -> list[tuple[str, float]]:
    """Return the name and gradient norm of each parameter that has a gradient; waits for the device once."""
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, parameter in named_parameters:
        if parameter.grad is not None:
            by_device.setdefault(parameter.grad.device, []).append((name, parameter.grad))
    norms: list[tuple[str, float]] = []
    for pairs in by_device.values():
        found = torch.stack([norm.double() for norm in torch._foreach_norm([gradient for _, gradient in pairs])])
        norms += zip([name for name, _ in pairs], found.tolist(), strict=True)
    return norms


def sort_by_layer(parts: Iterable[Sequence[tuple[str, float]]]) -> list[tuple[str, float]]:
    """Merge the norms of all processes, whose layers are not neighbours in an interleaved schedule.

    Names are layers.<index>.<name>; within a layer the order is kept.
    """
    norms = [(name, norm) for part in parts for name, norm in part]
    return sorted(norms, key=lambda pair: int(pair[0].split(".")[1]))


def global_norm(norms: Sequence[tuple[str, float]]) -> float:
    """Return the norm of all gradients together from those of each parameter.

    The squares are added without rounding in between, so the stages' boundaries leave no trace in the sum.

    Raises:
        ValueError: a norm is not finite; the first such parameter is named.
    """
    for name, norm in norms:
        if not math.isfinite(norm):
            raise ValueError(f"the gradient of {name} has the norm {norm}")
    return math.sqrt(math.fsum(norm * norm for _, norm in norms))


def scale_gradients(parameters: Iterable[Tensor], max_norm: float, norm: float) -> None:
    """Multiply the gradients by max_norm / norm where the norm is larger."""
    if norm <= max_norm:
        return
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        by_device.setdefault(parameter.device, []).append(parameter)
    for device, group in by_device.items():
        clip_grads_with_norm_(group, max_norm, torch.tensor(norm, dtype=torch.float64, device=device))
