"""The losses of a micro-batch: for classification of images or next tokens, and for translation."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from gpipe.training.cross_entropy import choose_ranks, find_correct, find_labelled, judge, widen_type


class _HeadsLoss(ABC):
    """The loss of the logits, plus a share of the auxiliary head's loss if the model has such a head."""

    def __init__(self, label_smoothing: float = 0.0, auxiliary_weight: float = 0.0) -> None:
        self.label_smoothing = _check_smoothing(label_smoothing)
        self.auxiliary_weight = auxiliary_weight

    def __call__(self, outputs: Tensor | tuple[Tensor, Tensor], targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss of a micro-batch and its metrics, all 0-dimensional.

        The metrics are detached and stay on the device, so that nothing waits for it.

        Args:
            outputs: logits [..., classes], or (logits, auxiliary logits).
            targets: see the class.
        """
        logits, auxiliary_logits = outputs if isinstance(outputs, tuple) else (outputs, None)
        loss, metrics = self._judge(logits, targets)
        if auxiliary_logits is not None:
            loss = loss + self.auxiliary_weight * self._judge(auxiliary_logits, targets)[0]
        return loss, metrics

    @abstractmethod
    def _judge(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]: ...


class ClassificationLoss(_HeadsLoss):
    """Cross-entropy with smoothed labels, plus a share of the auxiliary head's if the model has such a head.

    Targets are classes [...], one per image or per token; or, for mixed images, their probabilities [..., classes].
    Both are smoothed here, and nowhere else. The metrics are the fractions "top1" and, with 5 classes or more, "top5".
    A mixed image counts as one of the class with the larger share.

    Source: Real et al. 2019, which section 4 of the paper follows: label smoothing 0.1, auxiliary weight 0.4. Both
    heads are smoothed.
    """

    def _judge(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        ranks = choose_ranks(logits.shape[-1])
        if targets.is_floating_point():  # mixed images, which have few logits
            rows = logits.to(widen_type(logits.dtype)).flatten(0, -2)
            shares = targets.flatten(0, -2).to(rows.dtype)
            loss = F.cross_entropy(rows, shares, label_smoothing=self.label_smoothing)
            correct = find_correct(rows.detach(), shares.argmax(-1), ranks)
        else:
            found = judge(logits, targets, label_smoothing=self.label_smoothing, ranks=ranks)
            loss, correct = found.losses.mean(), found.correct
        return loss, {f"top{rank}": each.float().mean() for rank, each in zip(ranks, correct, strict=True)}


class MultiLabelLoss(_HeadsLoss):
    """Binary cross-entropy of each class with smoothed labels, averaged over the classes and the images.

    Targets say whether an image has each label: 0 or 1, float [n, classes]. Smoothing moves them towards one half. The
    metric "top1" is the fraction of images whose likeliest class is one of their labels.
    """

    def _judge(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits = logits.to(widen_type(logits.dtype))
        smoothed = targets.to(logits.dtype) * (1 - self.label_smoothing) + 0.5 * self.label_smoothing
        loss = F.binary_cross_entropy_with_logits(logits, smoothed)
        return loss, {"top1": find_labelled(logits.detach(), targets).float().mean()}


class TokenLoss:
    """Cross-entropy with smoothed labels, averaged over all target tokens except padding.

    Args:
        label_smoothing: 0.1 is usual, 0 is none.
        padding_index: the token that pads the targets.
        logit_limit: the model's limit of its logits; None if it has none. This loss only counts clipped logits.
        soft: whether the model limits logits with a tanh; then those count that were at the limit or beyond before it.
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        *,
        padding_index: int = 1,
        logit_limit: float | None = None,
        soft: bool = False,
    ) -> None:
        self.label_smoothing = _check_smoothing(label_smoothing)
        self.padding_index = padding_index
        self._limit = logit_limit if logit_limit is None or not soft else logit_limit * math.tanh(1.0)

    def __call__(self, logits: Tensor, targets: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss of a micro-batch, and the metrics "nll", "top1" and, with a logit limit, "clipped".

        "nll" is the loss without smoothing, in nats per token; "top1" the fraction of tokens predicted correctly;
        "clipped" the fraction of logits at or beyond the limit. All are 0-dimensional and stay on the device; all
        except the loss are detached. A micro-batch of only padding gives NaN, with weight 0.

        Args:
            logits: [batch, time, vocabulary].
            targets: "tokens", int64 [batch, time]; other entries are ignored.
        """
        tokens = targets["tokens"].flatten()
        counts = tokens != self.padding_index
        num_tokens = counts.sum()
        found = judge(logits, tokens, label_smoothing=self.label_smoothing, limit=self._limit)

        def average(values: Tensor) -> Tensor:
            return torch.where(counts, values, 0).sum() / num_tokens

        metrics = {"nll": average(found.nll), "top1": average(found.correct[0])}
        if found.num_at_limit is not None:
            metrics["clipped"] = average(found.num_at_limit) / logits.shape[-1]
        return average(found.losses), metrics


def count_tokens(targets: Mapping[str, Tensor], padding_index: int = 1) -> int:
    """Return the number of target tokens that are not padding."""
    return int((targets["tokens"] != padding_index).sum())


def _check_smoothing(label_smoothing: float) -> float:
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}, expected 0 to 1: 0.1 is usual, 0 is none.")
    return label_smoothing
