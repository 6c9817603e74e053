"""What an optimizer keeps and allocates, per byte of parameters, found by trying it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpipe.planning.ledger import Ledger
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
    with Ledger([*parameters, *gradients, *state]) as ledger:
        optimizer.step()
    num_bytes = sum(parameter.nbytes for parameter in parameters)
    return sum(value.nbytes for value in state if value.ndim > 0) / num_bytes, ledger.peak_bytes / num_bytes
