"""The losses of a micro-batch: of classification, of images or of next tokens, and of translation."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from gpipe.training.evaluation import find_correct, find_labelled, has_top5


class _HeadsLoss(ABC):
    """The loss of the logits, plus a share of that of the auxiliary head's where the model has one."""

    def __init__(self, label_smoothing: float = 0.0, auxiliary_weight: float = 0.0) -> None:
        _check_smoothing(label_smoothing)
        if auxiliary_weight < 0.0:
            raise ValueError(f"auxiliary_weight is {auxiliary_weight}, but a weight must be 0 or more.")
        self.label_smoothing = label_smoothing
        self.auxiliary_weight = auxiliary_weight

    def __call__(self, outputs: Tensor | tuple[Tensor, Tensor], targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss of a micro-batch and its metrics, all 0-dimensional.

        The metrics are detached and stay on the device: nothing here waits for it.

        Args:
            outputs: logits [..., classes], or (logits, auxiliary logits).
            targets: as the class says.
        """
        logits, auxiliary_logits = outputs if isinstance(outputs, tuple) else (outputs, None)
        loss = self._cost(_widen(logits), targets)
        if auxiliary_logits is not None:
            loss = loss + self.auxiliary_weight * self._cost(_widen(auxiliary_logits), targets)
        return loss, self._measure(logits.detach(), targets)

    @abstractmethod
    def _cost(self, logits: Tensor, targets: Tensor) -> Tensor: ...

    @abstractmethod
    def _measure(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]: ...


class ClassificationLoss(_HeadsLoss):
    """Cross-entropy with smoothed labels, plus a share of the auxiliary head's where the model has one.

    Targets are classes [...], one per image or per token; or, for mixed images, their probabilities [..., classes].
    Both are smoothed here, and nowhere else. The metrics are the fractions {"top1", "top5"}; "top5" exists from 5
    classes on. A mixed image counts as one of the class that has the larger share of it.

    Source: Real et al. 2019, which section 4 of the paper follows: label smoothing 0.1, auxiliary weight 0.4. Both
    heads are smoothed.
    """

    def _cost(self, logits: Tensor, targets: Tensor) -> Tensor:
        rows = logits.flatten(0, -2)
        rows_of_targets = targets.flatten(0, -2).to(rows.dtype) if targets.is_floating_point() else targets.flatten()
        return F.cross_entropy(rows, rows_of_targets, label_smoothing=self.label_smoothing)

    def _measure(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        classes = targets.argmax(-1) if targets.is_floating_point() else targets
        accuracies = {"top1": find_correct(logits, classes, 1).float().mean()}
        if has_top5(logits.shape[-1]):
            accuracies["top5"] = find_correct(logits, classes, 5).float().mean()
        return accuracies


class MultiLabelLoss(_HeadsLoss):
    """Binary cross-entropy of each class with smoothed labels, averaged over the classes and the images.

    Targets tell whether an image has each label: 0 or 1, float [n, classes]. Smoothing moves them towards one half. The
    metric "top1" is the fraction of images whose likeliest class is one of their labels.
    """

    def _cost(self, logits: Tensor, targets: Tensor) -> Tensor:
        smoothed = targets.to(logits.dtype) * (1 - self.label_smoothing) + 0.5 * self.label_smoothing
        return F.binary_cross_entropy_with_logits(logits, smoothed)

    def _measure(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"top1": find_labelled(logits, targets).float().mean()}


class TokenLoss:
    """Cross-entropy with smoothed labels, averaged over all target tokens but padding.

    Args:
        label_smoothing: 0.1 is usual, 0 is none.
        padding_index: the token that pads the targets.
        logit_limit: the model's limit of its logits, None where it has none. This loss only counts clipped logits.
        soft: whether the model limits logits by a tanh.
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        *,
        padding_index: int = 1,
        logit_limit: float | None = None,
        soft: bool = False,
    ) -> None:
        _check_smoothing(label_smoothing)
        self.label_smoothing = label_smoothing
        self.padding_index = padding_index
        self._limit = logit_limit if logit_limit is None or not soft else logit_limit * math.tanh(1.0)

    def __call__(self, logits: Tensor, targets: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss of a micro-batch, and {"nll", "top1"} and, where logits are clipped, "clipped".

        "nll" is the loss without smoothing, in nats per token; "top1" the fraction of tokens that were predicted right;
        "clipped" the fraction of logits at or beyond the limit. All are 0-dimensional and stay on the device; all but
        the loss are detached. A micro-batch of padding alone gives not-a-number: its weight is 0.

        Args:
            logits: [batch, time, vocabulary].
            targets: "tokens", int64 [batch, time]; other entries are ignored.
        """
        tokens = targets["tokens"].flatten()
        rows = _widen(logits).flatten(0, -2)
        loss = F.cross_entropy(rows, tokens, ignore_index=self.padding_index, label_smoothing=self.label_smoothing)
        rows, counts = rows.detach(), tokens != self.padding_index
        num_tokens = counts.sum()
        metrics = {"nll": loss.detach(), "top1": (find_correct(rows, tokens, 1) & counts).sum() / num_tokens}
        if self.label_smoothing > 0:
            metrics["nll"] = F.cross_entropy(rows, tokens, ignore_index=self.padding_index)
        if self._limit is not None:
            metrics["clipped"] = ((rows.abs() >= self._limit).float().mean(1) * counts).sum() / num_tokens
        return loss, metrics


def _check_smoothing(label_smoothing: float) -> None:
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}, but it must be at least 0 and less than 1.")


def _widen(logits: Tensor) -> Tensor:
    """Return logits in float32 at least: 16 bits have too few digits for a sum over classes or a vocabulary."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def count_tokens(targets: Mapping[str, Tensor], padding_index: int = 1) -> int:
    """Return the number of target tokens that are not padding."""
    return int((targets["tokens"] != padding_index).sum())
