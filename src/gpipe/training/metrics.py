"""Top-1 and top-5 accuracy: of one batch, and exactly over an evaluation set of uneven batches."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


def correct_in_top(logits: Tensor, targets: Tensor, k: int) -> Tensor:
    """Return for each target whether it is among the k largest logits: [..., classes], [...] -> bool [...]."""
    return (logits.topk(k, dim=-1).indices == targets[..., None]).any(dim=-1)


def has_top5(num_classes: int) -> bool:
    """Say whether top-5 means anything: with fewer than 5 classes it does not exist."""
    return num_classes >= 5


class Metrics(Protocol):
    """Measures batches of an evaluation set, on any process, and says what they come to; it remembers nothing."""

    def measure(self, outputs: Any, targets: Any) -> Tensor:
        """Return the sums of a batch, given the model's outputs for it: float64, of one shape for all batches."""

    def compute(self, sums: Tensor) -> dict[str, float]:
        """Return the figures, given the sums of all batches added up: "loss" and "top1" at least.

        "<part>/<figure>" is one of a part of the set.
        """


class EvaluationMetrics:
    """Mean loss and accuracies: every target, of an image or of a token, counts once, whatever batch it came in."""

    @torch.no_grad()
    def measure(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the number of targets, their loss, those in the top 1 and, from 5 classes on, those in the top 5.

        logits: [..., classes]; targets: class indices [...] on any device. The sums stay on the logits' device.
        """
        targets = targets.to(logits.device)
        # Without label smoothing: the evaluation loss is the likelihood of the data, comparable between recipes.
        losses = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
        ranks = (1, 5) if has_top5(logits.shape[-1]) else (1,)
        return torch.stack(
            [
                torch.tensor(targets.numel(), dtype=torch.float64, device=logits.device),
                losses.double().sum(),
                *(correct_in_top(logits, targets, rank).double().sum() for rank in ranks),
            ]
        )

    def compute(self, sums: Tensor) -> dict[str, float]:
        """Return the mean loss (natural logarithm) and the fractions top1 and, from 5 classes on, top5."""
        num_targets, *totals = sums.tolist()
        if num_targets == 0:
            raise ValueError("The evaluation set gave 0 targets: check its split.")
        return {name: total / num_targets for name, total in zip(("loss", "top1", "top5"), totals, strict=False)}
