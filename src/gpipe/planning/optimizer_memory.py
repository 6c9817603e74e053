"""What an optimizer keeps and allocates, per byte of parameters, found by trying it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpipe._compat.torch_description import TorchDispatchMode, tree_leaves
from gpipe.planning.memory import StateRatios

NUM_PARAMETERS = 64


def try_optimizer(make: Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]) -> StateRatios:
    """Return what an optimizer needs, found by running it on a CPU.

    make: makes it from named parameters, with the implementation that it will run with, such as the fused one on GPUs.
    """
    kept, one = _try(make, 1)
    kept, many = _try(make, NUM_PARAMETERS)
    update = (NUM_PARAMETERS * many - one) / (NUM_PARAMETERS - 1)
    return StateRatios(kept, update, one - update)


def _try(make: Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer], num_parameters: int) -> tuple[float, float]:
    """Return what an optimizer of equal parameters keeps, and what its update allocates, per byte of parameters."""
    parameters = [nn.Parameter(torch.zeros(64, 16)) for _ in range(num_parameters)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make([(f"layers.0.{number}", parameter) for number, parameter in enumerate(parameters)])
    optimizer.step()  # makes the state
    state = [value for own in optimizer.state.values() for value in own.values() if isinstance(value, Tensor)]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    with _Allocations([*parameters, *gradients, *state]) as allocations:
        optimizer.step()
    num_bytes = sum(parameter.nbytes for parameter in parameters)
    return sum(value.nbytes for value in state if value.ndim > 0) / num_bytes, allocations.peak_bytes / num_bytes


class _Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that operations in the body make; `known` existed before."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._held: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage())._cdata not in self._held:
                self._held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._held.pop, storage._cdata)
                self.peak_bytes = max(self.peak_bytes, sum(self._held.values()))
        return result
