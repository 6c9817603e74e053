"""Users' hooks of parameters, called once per step with the gradient of the whole mini-batch.

With a gradient scaler they see the scaled gradient, as with torch's. They may draw from the global generators, such as
noise: the numbers are the same in all replicas, and for every number of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

Hooks = dict[Any, Callable[[Tensor], Any]]


class _Taken(NamedTuple):
    """A parameter whose hooks were taken away, its layer's index in the model, and what it had."""

    layer: int
    parameter: Parameter
    on_gradient: Hooks
    after: Hooks
    before: Tensor | None  # the gradient of earlier steps, which was not zeroed


class ParameterHooks:
    """Takes the hooks of parameters away during a step, and calls them at its end.

    Autograd would call them once per micro-batch, with part of the gradient; the plain model has one backward.
    """

    def __init__(self) -> None:
        self._taken: list[_Taken] = []

    def take(self, modules: Mapping[int, Iterable[nn.Module]]) -> None:
        """Take the hooks of the modules' parameters; modules by layer."""
        own = ((p, layer) for layer, below in modules.items() for each in below for p in each._parameters.values())
        hooked = [
            (p, layer) for p, layer in own if p is not None and (p._backward_hooks or p._post_accumulate_grad_hooks)
        ]
        for parameter, layer in dict(hooked).items():
            dicts = parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}
            self._taken.append(_Taken(layer, parameter, dict(dicts[0]), dict(dicts[1]), parameter.grad))
            for hooks in dicts:
                hooks.clear()
            parameter.grad = None

    @torch.no_grad()
    def call(self, enter: Callable[[int], None]) -> None:
        """Give the hooks back, and call those of the parameters that have a gradient; `enter` each layer first."""
        _give_back(self._taken)
        entered = None
        while self._taken:  # if a hook fails, `give_back` handles the rest
            layer, parameter, on_gradient, after, before = self._taken.pop()
            if layer != entered:
                enter(entered := layer)
            if (gradient := parameter.grad) is None:
                parameter.grad = before
                continue
            for hook in on_gradient.values():
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            parameter.grad = gradient if before is None else before.add_(gradient)
            for hook in after.values():
                hook(parameter)

    @torch.no_grad()
    def give_back(self) -> None:
        """Give the hooks back after a step that failed, without calling them."""
        taken, self._taken = self._taken, []
        _give_back(taken)
        for _, parameter, _, _, before in taken:
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)


def _give_back(taken: Iterable[_Taken]) -> None:
    for _, parameter, on_gradient, after, _ in taken:
        for hooks, kept in ((parameter._backward_hooks, on_gradient), (parameter._post_accumulate_grad_hooks, after)):
            if kept:
                assert hooks is not None, "torch keeps the dictionary as long as the parameter"
                added = dict(hooks)
                hooks.clear()
                hooks.update(kept | added)
