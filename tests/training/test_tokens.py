"""The loss and the metrics of sentences with padding, against loops over their tokens."""

import math

import pytest
import torch
from torch import Tensor

from gpipe.training.evaluation import TokenMetrics
from gpipe.training.losses import TokenLoss, count_tokens

PADDING = 1


def batch(lengths: list[int], vocabulary_size: int = 11, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits in double precision, and sentences of these lengths, of languages 0, 1, 0, 1, ..."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, vocabulary_size, (len(lengths), max(lengths)), generator=generator)
    for row, length in zip(tokens, lengths, strict=True):
        row[length:] = PADDING
    logits = 3 * torch.randn(*tokens.shape, vocabulary_size, generator=generator, dtype=torch.float64)
    return logits, {"tokens": tokens, "language": torch.arange(len(lengths)) % 2}


def rows(logits: Tensor, targets: dict[str, Tensor], language: int | None = None) -> list[tuple[Tensor, int]]:
    """The logits and the token of every place that is not padding."""
    return [
        (logits[i, j], int(token))
        for i, sentence in enumerate(targets["tokens"])
        for j, token in enumerate(sentence)
        if token != PADDING and language in (None, int(targets["language"][i]))
    ]


def nll(places: list[tuple[Tensor, int]]) -> float:
    return sum(float(row.exp().sum().log() - row[token]) for row, token in places) / len(places)


def test_the_loss_is_the_mean_over_the_tokens_that_are_not_padding() -> None:
    logits, targets = batch([5, 2, 7, 1])
    places = rows(logits, targets)
    loss, metrics = TokenLoss()(logits, targets)
    assert math.isclose(loss.item(), nll(places), rel_tol=1e-12)
    assert math.isclose(metrics["nll"].item(), nll(places), rel_tol=1e-12)
    assert math.isclose(
        metrics["top1"].item(), sum(int(row.argmax()) == token for row, token in places) / 15, rel_tol=1e-6
    )
    assert count_tokens(targets) == len(places) == 15


def test_smoothing_spreads_a_share_over_the_vocabulary() -> None:
    logits, targets = batch([4, 6])
    places = rows(logits, targets)
    uniform = sum(float(row.exp().sum().log() - row.mean()) for row, _ in places) / len(places)
    loss, metrics = TokenLoss(0.1)(logits, targets)
    assert math.isclose(loss.item(), 0.9 * nll(places) + 0.1 * uniform, rel_tol=1e-12)
    assert math.isclose(metrics["nll"].item(), nll(places), rel_tol=1e-12)


def test_padding_has_no_gradient() -> None:
    logits, targets = batch([3, 5])
    logits.requires_grad_()
    TokenLoss(0.1)(logits, targets)[0].backward()
    assert logits.grad is not None
    assert (logits.grad[0, 3:] == 0).all() and (logits.grad[0, :3] != 0).all()


@pytest.mark.parametrize("soft", [False, True])
def test_the_clipped_fraction_counts_logits_at_the_limit(soft: bool) -> None:
    logits, targets = batch([5, 2, 7])
    expected = sum(int((row.abs() >= 2.0).sum()) for row, _ in rows(logits, targets)) / (14 * 11)
    clipped = 2.0 * torch.tanh(logits / 2.0) if soft else logits.clamp(-2.0, 2.0)
    _, metrics = TokenLoss(logit_limit=2.0, soft=soft)(clipped, targets)
    assert 0.2 < expected < 0.8
    assert math.isclose(metrics["clipped"].item(), expected, rel_tol=1e-6)


def test_without_a_limit_nothing_counts_as_clipped() -> None:
    assert "clipped" not in TokenLoss()(*batch([2]))[1]


def test_metrics_count_each_token_of_a_language_once_and_each_language_alike() -> None:
    metrics = TokenMetrics(["de", "fr", "sw"])
    parts: dict[int, list[tuple[Tensor, int]]] = {0: [], 1: []}
    sums = torch.zeros(3, 3, dtype=torch.float64)
    for seed, lengths in enumerate([[5, 2, 7], [1], [4, 4]]):
        logits, targets = batch(lengths, seed=seed)
        logits = logits.float()
        sums += metrics.measure(logits, targets)
        for language, places in parts.items():
            places += rows(logits, targets, language)
    found = metrics.compute(sums)
    assert found.keys() == {"loss", "top1", "de/loss", "de/top1", "fr/loss", "fr/top1"}  # nothing of Swahili came
    for name, places in (("de", parts[0]), ("fr", parts[1])):
        assert math.isclose(found[f"{name}/loss"], nll(places), rel_tol=1e-5)
        right = sum(int(row.argmax()) == token for row, token in places)
        assert math.isclose(found[f"{name}/top1"], right / len(places), rel_tol=1e-12)
    assert len(parts[0]) != len(parts[1]), "then a mean over languages is not one over tokens"
    for figure in ("loss", "top1"):
        assert found[figure] == (found[f"de/{figure}"] + found[f"fr/{figure}"]) / 2


def test_an_evaluation_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="0 tokens: check its split and its languages"):
        TokenMetrics(["de"]).compute(torch.zeros(1, 3, dtype=torch.float64))
