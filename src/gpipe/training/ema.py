"""The exponential moving average of weights and moving statistics, for evaluating a model."""

from typing import cast

import torch
from torch import Tensor, nn

import gpipe._compat.torchvision  # noqa: F401  (must come before timm, which imports torchvision)

from timm.utils.model_ema import ModelEmaV3  # isort: skip


class Ema:
    """A copy of this process's layers that averages their states over the steps.

    Floating-point parameters and buffers (the moving statistics too) are averaged, integer buffers copied.
    Source: the public TPU code averages weights and moving statistics with decay 0.9999.

    Deviation: the initial weights have no part in the average. After n updates, update i has its usual weight
    (1 - decay) * decay ** (n - i), divided by the sum of all weights, 1 - decay ** n. In a long run that changes
    nothing.
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
                # timm would round at random, from a generator that no checkpoint saves, or never change the average.
                raise ValueError(f"layers.{name} is {tensor.dtype}, too coarse for an average: keep float32 weights.")
        self._source = _Named(layers)
        self._average = _Average(self._source, decay=decay, use_warmup=warm_up)
        self._average.requires_grad_(False)

    @property
    def module(self) -> nn.ModuleDict:
        """The averaged layers, keyed like `pipeline.layers`, in evaluation mode."""
        return cast(_Named, self._average.module).layers

    def update(self, num_updates: int) -> None:
        """Move the average towards the layers' state after `num_updates` steps; skipped steps do not count."""
        self._average.update(self._source, num_updates)

    def state(self) -> dict[str, Tensor]:
        """Return the averaged tensors by name `layers.<i>.<name>`, sharing memory with the average."""
        return self.module.state_dict(prefix="layers.")


class _Average(ModelEmaV3):
    """timm's average with a decay that begins at 0."""

    def get_decay(self, step: int | None = None) -> float:
        """Return the decay of the update after `step` finished steps."""
        assert step is not None
        without_bias: float = self.decay * (1 - self.decay ** (step - 1)) / (1 - self.decay**step)
        return min(without_bias, (1 + step) / (10 + step)) if self.use_warmup else without_bias


class _Named(nn.Module):
    """Holds the layers under the name `layers`, beside one parameter.

    timm needs the device of the first parameter, but a stage of pooling and activations has no parameter.
    """

    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        device = next((tensor.device for tensor in layers.state_dict().values()), torch.device("cpu"))
        self._anchor = nn.Parameter(torch.zeros((), device=device), requires_grad=False)
        self.layers = layers

    def state_dict(self) -> dict[int, Tensor]:  # type: ignore[override]
        """Return each tensor once: timm would average one that a layer has under two names twice per step."""
        return {id(tensor): tensor for tensor in super().state_dict(keep_vars=True).values()}
