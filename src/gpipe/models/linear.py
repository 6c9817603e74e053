"""Fully connected layers, and the names of those that belong to one set of classes."""

from torch import nn

from gpipe.models.initialization import fill_normal, fill_truncated_normal


class Linear(nn.Linear):
    """Fully connected layer with bias; weights of variance scale^2 / fan-in, bias 0."""

    def __init__(self, in_features: int, out_features: int, scale: float = 1.0) -> None:
        self.scale = scale  # nn.Linear draws the weights
        super().__init__(in_features, out_features)

    def reset_parameters(self) -> None:
        """Draw the weights anew and clear the bias."""
        fill_normal(self.weight, self.scale**2 / self.in_features)
        nn.init.zeros_(self.bias)


class Softmax(nn.Linear):
    """Fully connected layer with bias that makes the logits; the softmax itself is the loss's.

    Weights of variance 1 / fan-in, bias 0.

    Deviation: AmoebaNet's softmax layer starts with weights of variance 1 / fan-in, where the public TPU code takes
    2 / fan-out, which with few classes starts at a loss far above chance.
    """

    def reset_parameters(self) -> None:
        """Draw the weights anew and clear the bias."""
        fill_truncated_normal(self.weight, 1.0 / self.in_features)
        nn.init.zeros_(self.bias)


def softmax_names(layers: nn.ModuleDict) -> set[str]:
    """Return the names `layers.<i>.<name>` of the softmax layers' parameters, which belong to one set of classes.

    layers: any part of a model by layer index, such as `pipeline.layers`. An auxiliary head has a softmax layer too.
    """
    return {
        f"layers.{index}.{path}.{name}" if path else f"layers.{index}.{name}"
        for index, layer in layers.items()
        for path, module in layer.named_modules()
        if isinstance(module, Softmax)
        for name, _ in module.named_parameters()
    }
