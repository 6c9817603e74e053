"""The loss of classification, of images or of next tokens: smoothed labels, and the auxiliary head's share."""

import torch
from torch import Tensor
from torch.nn import functional as F

from gpipe.training.metrics import correct_in_top, has_top5


class ClassificationLoss:
    """Cross-entropy with smoothed labels, plus a share of the auxiliary head's where the model has one.

    Source: paper.md section 4, after Real et al.: label smoothing 0.1, auxiliary weight 0.4. Both heads are smoothed.
    """

    def __init__(self, label_smoothing: float = 0.0, auxiliary_weight: float = 0.0) -> None:
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing is {label_smoothing}, but it must be at least 0 and less than 1.")
        if auxiliary_weight < 0.0:
            raise ValueError(f"auxiliary_weight is {auxiliary_weight}, but a weight must be 0 or more.")
        self.label_smoothing = label_smoothing
        self.auxiliary_weight = auxiliary_weight

    def __call__(self, outputs: Tensor | tuple[Tensor, Tensor], targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss of a micro-batch and the fractions {"top1", "top5"}, all 0-dimensional.

        `outputs` are logits [..., classes], or (logits, auxiliary logits); `targets` are class indices [...], one an
        image, or one a token. The metrics are detached and stay on the device: nothing here waits for it. "top5"
        exists from 5 classes on.
        """
        logits, auxiliary_logits = outputs if isinstance(outputs, tuple) else (outputs, None)
        loss = self._cross_entropy(logits, targets)
        if auxiliary_logits is not None:
            loss = loss + self.auxiliary_weight * self._cross_entropy(auxiliary_logits, targets)
        return loss, _accuracies(logits.detach(), targets)

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        # Half precision has too few digits for the sum over classes.
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), label_smoothing=self.label_smoothing)


def _accuracies(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    accuracies = {"top1": correct_in_top(logits, targets, 1).float().mean()}
    if has_top5(logits.shape[-1]):
        accuracies["top5"] = correct_in_top(logits, targets, 5).float().mean()
    return accuracies
