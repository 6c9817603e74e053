"""The exponential moving average of weights and moving statistics, for evaluating a model."""

import copy

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Ema:
    """A copy of this process's layers that averages their states over the steps.

    Floating-point parameters and buffers (the moving statistics too) are averaged, integer buffers copied.
    Source: the public TPU code averages weights and moving statistics with decay 0.9999.

    Deviation: the initial weights have no part in the average. After n updates, update i has its usual weight
    (1 - decay) * decay ** (n - i), divided by the sum of all weights, 1 - decay ** n. In a long run that changes
    nothing.

    Attributes:
        module: the averaged layers, keyed like `pipeline.layers`, in evaluation mode.
    """

    def __init__(self, layers: nn.ModuleDict, decay: float = 0.9999, *, warm_up: bool = False) -> None:
        """Start from a copy of `layers` as they are now.

        Args:
            layers: this process's layers, by index.
            decay: the average's decay per step.
            warm_up: limit the decay after n steps to (1 + n) / (10 + n), the rule of TensorFlow's
                ExponentialMovingAverage(num_updates=n), so that a short run averages over its last steps.

        Raises:
            ValueError: the decay is outside [0, 1), or weights have 16 bits.
        """
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"ema.decay is {decay}, but it must be at least 0 and less than 1.")
        for name, tensor in layers.state_dict().items():
            if tensor.dtype in (torch.float16, torch.bfloat16):
                raise ValueError(f"layers.{name} is {tensor.dtype}, too coarse for an average: keep float32 weights.")
        self.module = copy.deepcopy(layers).eval().requires_grad_(False)
        self._source, self._decay, self._warm_up = layers, decay, warm_up

    @torch.no_grad()
    def update(self, num_updates: int) -> None:
        """Move the average towards the layers' state after `num_updates` steps; skipped steps do not count."""
        decay = self._decay * (1 - self._decay ** (num_updates - 1)) / (1 - self._decay**num_updates)  # 0 at first
        if self._warm_up:
            decay = min(decay, (1 + num_updates) / (10 + num_updates))
        states = (layers.state_dict(keep_vars=True).values() for layers in (self.module, self._source))
        # By id: a layer may have a tensor under two names.
        pairs = {id(average): (average, own) for average, own in zip(*states, strict=True)}.values()
        for average, own in pairs:
            if not average.is_floating_point():
                average.copy_(own)
        if averaged := [pair for pair in pairs if pair[0].is_floating_point()]:
            averages, owns = zip(*averaged, strict=True)
            get_ema_multi_avg_fn(decay)(averages, owns, num_updates)

    def state(self) -> dict[str, Tensor]:
        """Return the averaged tensors by name `layers.<i>.<name>`, sharing memory with the average."""
        return self.module.state_dict(prefix="layers.")
