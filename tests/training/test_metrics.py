"""Evaluation over batches against the same on all examples at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from gpipe.training.evaluation import EvaluationMetrics


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), num_classes=st.integers(2, 12))
def test_uneven_batches_give_what_the_concatenation_gives(sizes: list[int], num_classes: int) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    logits = torch.randn(sum(sizes), num_classes, generator=generator)
    targets = torch.randint(num_classes, (sum(sizes),), generator=generator)
    metrics = EvaluationMetrics()
    batches = [metrics.measure(*part) for part in zip(logits.split(sizes), targets.split(sizes), strict=True)]
    result, expected = metrics.compute(torch.stack(batches).sum(0)), metrics.compute(metrics.measure(logits, targets))
    assert result["top1"] == expected["top1"] == (logits.argmax(dim=1) == targets).sum().item() / sum(sizes)
    assert result.get("top5") == expected.get("top5")
    assert ("top5" in result) == (num_classes >= 5)
    assert result["loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-5)


def test_an_evaluation_set_without_targets_is_refused() -> None:
    metrics = EvaluationMetrics()
    with pytest.raises(ValueError, match="0 targets"):
        metrics.compute(metrics.measure(torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64)))


def test_every_token_counts_once() -> None:
    logits, targets = torch.randn(5, 4, 7), torch.randint(7, (5, 4))
    metrics = EvaluationMetrics()
    tokens = metrics.measure(logits[:2], targets[:2]) + metrics.measure(logits[2:], targets[2:])
    rows = metrics.measure(logits.reshape(20, 7), targets.reshape(20))
    assert metrics.compute(tokens) == pytest.approx(metrics.compute(rows), rel=1e-12)
