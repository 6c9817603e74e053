"""Evaluation over batches against the same on all examples at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from gpipe.training.metrics import EvaluationMetrics


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), num_classes=st.integers(2, 12))
def test_uneven_batches_give_what_the_concatenation_gives(sizes: list[int], num_classes: int) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    logits = torch.randn(sum(sizes), num_classes, generator=generator)
    targets = torch.randint(num_classes, (sum(sizes),), generator=generator)
    batches, whole = EvaluationMetrics(), EvaluationMetrics()
    for part, part_targets in zip(logits.split(sizes), targets.split(sizes), strict=True):
        batches.update(part, part_targets)
    whole.update(logits, targets)
    result, expected = batches.compute(), whole.compute()
    assert result["top1"] == expected["top1"] == (logits.argmax(dim=1) == targets).sum().item() / sum(sizes)
    assert result.get("top5") == expected.get("top5")
    assert ("top5" in result) == (num_classes >= 5)
    assert result["loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-5)
    assert batches.num_targets == sum(sizes)


def test_an_empty_evaluation_set_is_refused() -> None:
    with pytest.raises(ValueError, match="0 examples"):
        EvaluationMetrics().compute()


def test_every_token_counts_once() -> None:
    logits, targets = torch.randn(5, 4, 7), torch.randint(7, (5, 4))
    tokens, rows = EvaluationMetrics(), EvaluationMetrics()
    for part in ((logits[:2], targets[:2]), (logits[2:], targets[2:])):
        tokens.update(*part)
    rows.update(logits.reshape(20, 7), targets.reshape(20))
    assert tokens.compute() == pytest.approx(rows.compute(), rel=1e-12)
