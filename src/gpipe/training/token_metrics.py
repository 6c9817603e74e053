"""Loss and token accuracy over an evaluation set of sentences, in all and a language."""

from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor
from torch.nn import functional as F

from gpipe.training.metrics import correct_in_top


class TokenMetrics:
    """Means over languages; in a language every target token but padding counts alike.

    languages: their names, in the order of the numbers that the targets give. Each that has tokens counts alike in the
    average, as in the paper's: the few sentences of a poor one weigh as much as the many of a rich one.
    """

    def __init__(self, languages: Sequence[str], padding_index: int = 1) -> None:
        self._languages = tuple(languages)
        self._padding_index = padding_index

    @torch.no_grad()
    def measure(self, logits: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Return [languages, 3], in each language the number of tokens, their loss, and those that were told right.

        logits: [batch, time, vocabulary]; targets: "tokens" [batch, time], "language" [batch].
        """
        tokens = targets["tokens"].to(logits.device)
        counts = tokens != self._padding_index
        # Without label smoothing: the evaluation loss is the likelihood of the data, comparable between recipes.
        losses = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)
        right = correct_in_top(logits, tokens, 1)
        rows = torch.stack([(values * counts).double().sum(1) for values in (counts, losses, right)], dim=1)
        sums = torch.zeros(len(self._languages), 3, dtype=torch.float64, device=logits.device)
        return sums.index_add(0, targets["language"].to(logits.device), rows)

    def compute(self, sums: Tensor) -> dict[str, float]:
        """Return "<language>/loss" (nats per token) and "<language>/top1", and their means over the languages."""
        rows = zip(self._languages, sums.tolist(), strict=True)
        found = {name: (loss / count, right / count) for name, (count, loss, right) in rows if count}
        if not found:
            raise ValueError("The evaluation set gave 0 tokens: check its split and its languages.")
        loss, top1 = (fmean(column) for column in zip(*found.values(), strict=True))
        losses = {f"{name}/loss": value for name, (value, _) in found.items()}
        return {"loss": loss, "top1": top1, **losses, **{f"{name}/top1": value for name, (_, value) in found.items()}}
