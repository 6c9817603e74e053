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
    """Adds up figures over an evaluation set."""

    def update(self, outputs: Any, targets: Any) -> None:
        """Add the model's outputs for a batch, and its targets."""

    def compute(self) -> dict[str, float]:
        """Return the figures: "loss" and "top1" at least; "<part>/<figure>" is one of a part of the set."""


class EvaluationMetrics:
    """Counts over a whole evaluation set; the sums stay on the logits' device until `compute`.

    Every target, of an image or of a token, counts once, whatever batch it came in: batches need not have equal sizes.
    """

    def __init__(self) -> None:
        self.num_targets = 0
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits [..., classes], class indices [...] on any device."""
        targets = targets.to(logits.device)
        # Without label smoothing: the evaluation loss is the likelihood of the data, comparable between recipes.
        sums = {
            "loss": F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none").double().sum(),
            "top1": correct_in_top(logits, targets, 1).sum(),
        }
        if has_top5(logits.shape[-1]):
            sums["top5"] = correct_in_top(logits, targets, 5).sum()
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self.num_targets += targets.numel()

    def compute(self) -> dict[str, float]:
        """Return the mean loss (natural logarithm) and the fractions top1 and, from 5 classes on, top5."""
        if self.num_targets == 0:
            raise ValueError("The evaluation set gave 0 examples: check its split and that drop_last is off.")
        return {name: float(value) / self.num_targets for name, value in self._sums.items()}
