"""What a pipeline expects of a loss function, and what torch's losses average over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


def refuse_loss(loss: Any) -> None:
    """Refuse a loss that a pipeline would not train as expected."""
    if not callable(loss):
        raise TypeError(f"loss is of type {type(loss).__name__}; it must be a function of (outputs, targets)")
    if isinstance(loss, type):
        raise TypeError(f"loss is the class {loss.__name__}; give an instance of it, {loss.__name__}()")
    if type(loss).__module__ == nn.modules.loss.__name__ and getattr(loss, "reduction", None) == "sum":
        raise ValueError(
            "loss has reduction='sum', but the mean of the micro-batches' sums is not the mini-batch's; set "
            "reduction='mean'"
        )
    for name, parameter in loss.named_parameters() if isinstance(loss, nn.Module) else ():
        if parameter.requires_grad:
            raise ValueError(
                f"the loss has the parameter {name}, which the pipeline would not train; put it into the last layer, "
                "or freeze it (requires_grad_(False))"
            )


def weight_of(loss: Any) -> Callable[[Any], float] | None:
    """Return what torch's cross entropies divide by: the targets not ignored, or their class weights; else None."""
    if not (isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or loss is F.cross_entropy or loss is F.nll_loss):
        return None

    def weigh_targets(targets: Any) -> float:
        if not isinstance(targets, Tensor) or targets.is_floating_point():  # probabilities: none is ignored
            return len(targets)
        counted = targets[targets != getattr(loss, "ignore_index", -100)]
        class_weights = getattr(loss, "weight", None)  # on a GPU perhaps, while targets are still on the host
        return len(counted) if class_weights is None else float(class_weights[counted].sum())

    return weigh_targets


def weigh(weight: Callable[[Any], Any], targets: Any) -> float:
    """Return how much a micro-batch counts, given its targets; refuse a weight that is not a number."""
    found = weight(targets)
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"loss_weight returned {_describe(found)}; return one number per micro-batch, such as its number of tokens"
        ) from None


def check_scalars(result: Any) -> dict[str, Tensor]:
    """Return the loss, under the name "loss", and the metrics that a loss function returned.

    Raises:
        TypeError: one is not a scalar, or the loss is complex.
        ValueError: the metrics are not a dict, or one is called "loss".
    """
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(loss, Tensor) or loss.ndim > 0:
        raise TypeError(f"the loss has {_describe(loss)}; return one number, the mean over the micro-batch")
    if loss.is_complex():
        raise TypeError("the loss is a complex number; return a real one, such as its absolute value")
    if not isinstance(metrics, dict) or "loss" in metrics:
        found = "a metric called 'loss'" if isinstance(metrics, dict) else f"metrics of type {type(metrics).__name__}"
        raise ValueError(f"the loss came with {found}; return (loss, {{name: scalar}}), and no metric under that name")
    for name, value in metrics.items():
        if not isinstance(value, Tensor) or value.ndim > 0:
            raise TypeError(f"the metric {name!r} has {_describe(value)}; return a scalar tensor for each micro-batch")
    return {"loss": loss, **metrics}


def _describe(value: Any) -> str:
    return f"the shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"the type {type(value).__name__}"
