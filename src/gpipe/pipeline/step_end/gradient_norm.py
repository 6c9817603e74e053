"""The global norm of the gradients, the same to the last bit for every number of stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gpipe.pipeline._compat import multiply_each, norm_of_each


def name_parameters(layers: nn.ModuleDict) -> dict[str, Tensor]:
    """Return each parameter once, by `layers.<i>.<name>`: `named_parameters` in less than half the time."""
    found: dict[str, Tensor] = {}
    _name_parameters("layers.", layers, found, set())
    return found


def _name_parameters(prefix: str, module: nn.Module, found: dict[str, Tensor], seen: set[int]) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in seen:
            seen.add(id(parameter))
            found[prefix + name] = parameter
    for name, child in module._modules.items():
        if child is not None:
            _name_parameters(f"{prefix}{name}.", child, found, seen)


def compute_norms(
    named_parameters: Iterable[tuple[str, Tensor]], beside: Mapping[str, Tensor] | None = None
) -> list[tuple[str, float]]:
    """Return the name and gradient norm of each parameter that has a gradient; waits for the devices once.

    beside: other numbers, float64, which are read in the same wait and returned after the norms.

    Raises:
        ValueError: a gradient is sparse.
    """
    named = ((name, parameter.grad) for name, parameter in named_parameters)
    gradients = {name: local_part(gradient) for name, gradient in named if gradient is not None}
    alike: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, gradient in gradients.items():
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"the gradient of {name} is sparse, and only dense ones can be added up and clipped alike for every "
                "number of stages; set sparse=False in its layer"
            )
        alike.setdefault((gradient.device, gradient.dtype), []).append(name)
    rows: dict[torch.device, list[tuple[list[str], Tensor]]] = {}
    for (device, dtype), names in alike.items():
        wide = torch.float32 if dtype.itemsize == 2 else None  # in float16, norms of finite numbers soon overflow
        norms = norm_of_each([gradients[name] for name in names], dtype=wide)
        rows.setdefault(device, []).append((names, torch.stack(norms).double()))
    for name, number in (beside or {}).items():
        rows.setdefault(number.device, []).append(([f"beside {name}"], number.view(1)))
    found: dict[str, float] = {}
    # The norms of all GPUs are collected on one of them, as the host waits for each GPU that it reads from.
    for type_ in {device.type for device in rows}:
        own = [row for device, of_device in rows.items() if device.type == type_ for row in of_device]
        first = own[0][1].device
        numbers = torch.cat([part.to(first, non_blocking=True) for _, part in own]).tolist()
        found.update(zip((name for names, _ in own for name in names), numbers, strict=True))
    exact = [(name, _recompute_if_not_finite(found[name], gradient)) for name, gradient in gradients.items()]
    return exact + [(name, found[f"beside {name}"]) for name in beside or {}]


def _recompute_if_not_finite(norm: float, gradient: Tensor) -> float:
    """Return a norm; if it is not finite, recompute it in double precision: perhaps only a square overflowed."""
    if math.isfinite(norm):
        return norm
    wide = torch.complex128 if gradient.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(gradient, dtype=wide))


def join_parts(parts: Sequence[Sequence[tuple[str, float]]]) -> list[tuple[str, float]]:
    """Return the norm of each gradient that replicas shard, from the norms of its shards."""
    return [(same[0][0], math.sqrt(math.fsum(norm * norm for _, norm in same))) for same in zip(*parts, strict=True)]


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor that replicas shard; any other tensor as it is."""
    if type(tensor) is Tensor:  # looking for an attribute that is not there takes ten times as long
        return tensor
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def sort_by_layer(parts: Iterable[Sequence[tuple[str, float]]]) -> list[tuple[str, float]]:
    """Merge the norms of all processes, whose layers are not consecutive in an interleaved schedule.

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
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            part = local_part(parameter.grad)
            alike.setdefault((part.device, part.dtype), []).append(part)
    for gradients in alike.values():
        multiply_each(gradients, max_norm / (norm + 1e-6))  # torch's clip_grad_norm_ adds as much
