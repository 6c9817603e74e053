"""Scaling of the loss, so that gradients in float16 do not vanish."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from gpipe.pipeline._compat import multiply_each

_LEAST_SCALE = 2.0**-126  # the smallest normal number of float32; below it gradients would be rounded


class GradientScaler:
    """Multiplies the loss of training steps by a scale, and divides the gradients of all stages by it.

    A step in which a gradient is infinite or not a number is skipped: no process has a gradient after it, so no
    optimizer changes anything, and the scale falls. After enough other steps it rises. Every process has its own
    scaler; they stay equal. If gradients are added up over several steps, a skipped step loses those before it too.

    Args:
        scale: the initial scale; a power of two does not change the bits of gradients.
        growth_factor: the factor by which it rises.
        backoff_factor: the factor by which it falls.
        growth_interval: the number of steps in a row after which it rises; math.inf: never.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: float = 2000,
    ) -> None:
        checks: tuple[tuple[str, float, Callable[[float], bool], str], ...] = (
            ("scale", scale, lambda one: 0 < one < math.inf, "finite and above 0"),
            ("growth_factor", growth_factor, lambda one: 1 <= one < math.inf, "finite and at least 1"),
            ("backoff_factor", backoff_factor, lambda one: 0 < one < 1, "between 0 and 1"),
            (
                "growth_interval",
                growth_interval,
                lambda one: one >= 1 and (one == math.inf or one % 1 == 0),
                "whole and at least 1",
            ),
        )
        for name, value, is_valid, valid in checks:
            if not (isinstance(value, (int, float)) and is_valid(value)):
                raise ValueError(f"{name} is {value!r}; it must be a number, {valid}")
        self.scale = float(scale)
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval
        self._num_steps = 0  # in a row
        self.num_skipped = 0

    def scale_earlier(self, parameters: Iterable[Tensor]) -> None:
        """Scale the gradients of earlier steps, to which scaled ones will be added."""
        _multiply(parameters, self.scale)

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients by the scale."""
        _multiply(parameters, 1 / self.scale)

    def update(self, *, is_skipped: bool) -> None:
        """Adapt the scale after a step.

        Raises:
            ValueError: so many steps were skipped that the scale vanishes: it is not what makes gradients infinite.
        """
        self._num_steps = 0 if is_skipped else self._num_steps + 1
        self.num_skipped += is_skipped
        if is_skipped:
            self.scale *= self._backoff_factor
            if self.scale < _LEAST_SCALE:
                raise ValueError(
                    f"the scale has fallen below {_LEAST_SCALE:g} after {self.num_skipped} skipped steps, and "
                    "gradients are still not finite; find the first number that is not with "
                    "Pipeline.first_non_finite, or train without a scaler"
                )
        elif self._num_steps >= self._growth_interval:
            self.scale, self._num_steps = min(self.scale * self._growth_factor, 2.0**126), 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, of JSON's types."""
        return {"scale": self.scale, "num_steps": self._num_steps, "num_skipped": self.num_skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: the saved scale is not finite and above 0.
        """
        if not 0 < (scale := float(state["scale"])) < math.inf:
            raise ValueError(f"the saved scale is {scale}; it must be finite and above 0: resume without that state")
        self.scale, self._num_steps = scale, int(state["num_steps"])
        self.num_skipped = int(state["num_skipped"])


def _multiply(parameters: Iterable[Tensor], factor: float) -> None:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and factor != 1:
        multiply_each(gradients, factor)
