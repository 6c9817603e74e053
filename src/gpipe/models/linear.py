"""Fully connected layers, their initial weights, and the names of the softmax layers' parameters."""

import math

from torch import Tensor, nn


def fill_truncated_normal(weight: Tensor, variance: float) -> None:
    """Fill `weight` from a normal distribution of about this variance, truncated at two standard deviations.

    The factor 1.3 makes up for the variance that truncation removes, as in TensorFlow's variance scaling.
    """
    if weight.is_meta:  # saves a millisecond per weight: deep models are described many times
        return
    std = math.sqrt(1.3 * variance)
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def fill_normal(weight: Tensor, variance: float) -> None:
    """Fill `weight` from a normal distribution of this variance, ten times faster than from a truncated one."""
    if not weight.is_meta:  # as above
        nn.init.normal_(weight, std=math.sqrt(variance))


class Linear(nn.Linear):
    """Fully connected layer with bias; weights of variance scale^2 / fan-in, bias 0."""

    wants_low_precision = True

    def __init__(self, in_features: int, out_features: int, scale: float = 1.0) -> None:
        self.scale = scale  # before nn.Linear draws the weights
        super().__init__(in_features, out_features)

    def reset_parameters(self) -> None:
        """Redraw the weights and zero the bias."""
        fill_normal(self.weight, self.scale**2 / self.in_features)
        nn.init.zeros_(self.bias)


class Softmax(nn.Linear):
    """Fully connected layer with bias that computes the logits; the softmax itself is part of the loss.

    Weights of variance 1 / fan-in, bias 0.

    Deviation: AmoebaNet's softmax layer starts with weights of variance 1 / fan-in; the public TPU code takes 2 /
    fan-out. With few classes, that starts at a loss far above chance.
    """

    wants_low_precision = True

    def reset_parameters(self) -> None:
        """Redraw the weights and zero the bias."""
        fill_truncated_normal(self.weight, 1.0 / self.in_features)
        nn.init.zeros_(self.bias)


def softmax_names(layers: nn.ModuleDict) -> set[str]:
    """Return the names `layers.<i>.<name>` of the softmax layers' parameters, which fit only one set of classes."""
    return {
        f"layers.{path}.{name}"
        for path, module in layers.named_modules(remove_duplicate=False)
        if isinstance(module, Softmax)
        for name, _ in module.named_parameters()
    }
