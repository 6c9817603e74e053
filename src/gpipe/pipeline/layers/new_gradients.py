"""Gradients that autograd leaves in one memory, separated before those of other micro-batches are added in place."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gpipe.pipeline.microbatch import Payload


class NewGradients:
    """The first gradients of a stage's parameters in a step.

    If a layer uses a parameter through a view, autograd may leave its gradient in the memory of another one.
    """

    def __init__(self) -> None:
        self._missing: list[Parameter] = []  # the parameters that have none yet

    def start_step(self, modules: Iterable[nn.Module]) -> None:
        """Note which trained parameters of the modules have no gradient."""
        own = (p for module in modules for p in module._parameters.values() if p is not None)
        self._missing = [parameter for parameter in own if parameter.requires_grad and parameter.grad is None]

    def separate(self, held: Iterable[Tensor | None]) -> None:
        """Give new gradients memory of their own.

        held: gradients that something else reads later.
        """
        made = [(p, p.grad) for p in self._missing if p.grad is not None and p.grad.layout is torch.strided]
        if not made:
            return
        self._missing = [parameter for parameter in self._missing if parameter.grad is None]
        others = [other for other in held if other is not None and other.layout is torch.strided]
        found = Payload([*(own for _, own in made), *others], None, [])
        found.find_shared(found)
        for (parameter, own), is_shared in zip(made, found.shared, strict=False):
            if is_shared:
                parameter.grad = own.clone()
