"""Loss and token accuracy over an evaluation set of sentences, in all and a language."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gpipe.training.metrics import correct_in_top


class TokenMetrics:
    """Counts over a whole evaluation set; every target token but padding counts once.

    languages: their names, in the order of the numbers that the targets give.
    """

    def __init__(self, languages: Sequence[str], padding_index: int = 1) -> None:
        self._languages = tuple(languages)
        self._padding_index = padding_index
        self._sums = torch.zeros(len(self._languages), 3, dtype=torch.float64)  # tokens, loss, right ones

    @torch.no_grad()
    def update(self, logits: Tensor, targets: Mapping[str, Tensor]) -> None:
        """Add a batch: logits [batch, time, vocabulary]; targets "tokens" [batch, time], "language" [batch]."""
        tokens = targets["tokens"].to(logits.device)
        counts = tokens != self._padding_index
        # Without label smoothing: the evaluation loss is the likelihood of the data, comparable between recipes.
        losses = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)
        right = correct_in_top(logits, tokens, 1)
        rows = torch.stack([(values * counts).double().sum(1) for values in (counts, losses, right)], dim=1)
        self._sums = self._sums.to(logits.device).index_add(0, targets["language"].to(logits.device), rows)

    def compute(self) -> dict[str, float]:
        """Return loss (nats a token) and top1 over all tokens, and "<language>/loss" and "<language>/top1" of each."""
        sums = self._sums.tolist()
        total = [sum(column) for column in zip(*sums, strict=True)]
        if total[0] == 0:
            raise ValueError("The evaluation set gave 0 tokens: check its split and its languages.")
        named = [("", total), *((f"{name}/", row) for name, row in zip(self._languages, sums, strict=True) if row[0])]
        return {
            f"{prefix}{figure}": value / num_tokens
            for prefix, (num_tokens, loss, right) in named
            for figure, value in (("loss", loss), ("top1", right))
        }
