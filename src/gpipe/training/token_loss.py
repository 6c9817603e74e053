"""The loss of translation: smoothed labels over the tokens that are not padding."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from gpipe.training.metrics import correct_in_top


class TokenLoss:
    """Cross-entropy with smoothed labels, the mean over all target tokens but padding.

    logit_limit: of the model's logits, None where it clips none; soft: whether it clips them by a tanh. They say which
    logits count as clipped, and change nothing in the loss.
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        *,
        padding_index: int = 1,
        logit_limit: float | None = None,
        soft: bool = False,
    ) -> None:
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing is {label_smoothing}, but it must be at least 0 and less than 1.")
        self.label_smoothing = label_smoothing
        self.padding_index = padding_index
        self._limit = logit_limit if logit_limit is None or not soft else logit_limit * math.tanh(1.0)

    def __call__(self, logits: Tensor, targets: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss of a micro-batch, and {"nll", "top1"} and, where logits are clipped, "clipped".

        logits: [batch, time, vocabulary]. targets: "tokens", int64 [batch, time]; other entries are not looked at.
        "nll" is the loss without smoothing, in nats a token; "top1" the fraction of tokens that were told right;
        "clipped" the fraction of logits at the limit or beyond. All are 0-dimensional, detached but for the loss, and
        stay on the device. A micro-batch of padding alone gives not-a-number: its weight is 0.
        """
        tokens = targets["tokens"].flatten()
        # Half precision has too few digits for the sum over a vocabulary.
        rows = (logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits).flatten(0, -2)
        loss = F.cross_entropy(rows, tokens, ignore_index=self.padding_index, label_smoothing=self.label_smoothing)
        rows, counts = rows.detach(), tokens != self.padding_index
        num_tokens = counts.sum()
        metrics = {"nll": loss.detach(), "top1": (correct_in_top(rows, tokens, 1) & counts).sum() / num_tokens}
        if self.label_smoothing > 0:
            metrics["nll"] = F.cross_entropy(rows, tokens, ignore_index=self.padding_index)
        if self._limit is not None:
            metrics["clipped"] = ((rows.abs() >= self._limit).float().mean(1) * counts).sum() / num_tokens
        return loss, metrics


def count_tokens(targets: Mapping[str, Tensor], padding_index: int = 1) -> int:
    """Return the number of target tokens that are not padding."""
    return int((targets["tokens"] != padding_index).sum())
