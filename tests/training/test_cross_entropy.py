"""One pass over logits against torch's cross-entropy and sorting: figures, gradients, bits, and memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from gpipe.planning.ledger import Ledger
from gpipe.training import cross_entropy
from gpipe.training.cross_entropy import PIECE_BYTES, choose_ranks, judge
from gpipe.training.evaluation import EvaluationMetrics, TokenMetrics

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def random_rows(num_rows: int, num_classes: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num_rows, num_classes, generator=generator, dtype=torch.float64)
    return logits.to(dtype).requires_grad_(), torch.randint(num_classes, (num_rows,), generator=generator)


@given(
    num_rows=st.integers(1, 12),
    num_classes=st.integers(2, 30),
    smoothing=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0),
)
def test_losses_and_gradients_are_those_of_torch(num_rows: int, num_classes: int, smoothing: float, seed: int) -> None:
    logits, targets = random_rows(num_rows, num_classes, torch.float64, seed % 1000)
    weights = torch.rand(num_rows, dtype=torch.float64)
    found = judge(logits, targets, label_smoothing=smoothing)
    expected = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(found.losses, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.nll, F.cross_entropy(logits, targets, reduction="none"), rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad((found.losses * weights).sum(), logits)
    torch.testing.assert_close(
        gradient, torch.autograd.grad((expected * weights).sum(), logits)[0], rtol=1e-12, atol=1e-12
    )


def test_ranks_and_limit_count_as_sorting_and_comparing_do() -> None:
    logits, targets = random_rows(60, 9, torch.float32)
    found = judge(logits, targets, ranks=choose_ranks(9), limit=4.0)
    order = logits.argsort(1, descending=True).tolist()
    for rank, correct in zip((1, 5), found.correct, strict=True):
        assert correct.tolist() == [int(target) in row[:rank] for row, target in zip(order, targets, strict=True)]
    assert found.num_at_limit is not None
    assert found.num_at_limit.tolist() == [sum(abs(value) >= 4.0 for value in row) for row in logits.tolist()]
    assert 0 < found.num_at_limit.sum() < 60 * 9


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for num_rows in (137, 8, 1):
        logits, targets = random_rows(137, 1001, dtype)
        monkeypatch.setattr(cross_entropy, "PIECE_BYTES", num_rows * 1001 * max(4, dtype.itemsize))
        figures = judge(logits, targets, label_smoothing=0.1, ranks=(1, 5), limit=4.0)
        (gradient,) = torch.autograd.grad(figures.losses.mean(), logits)
        found.append([figures.losses, figures.nll, *figures.correct, figures.num_at_limit, gradient])
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


@given(num_rows=st.integers(0, 10**6), num_classes=st.integers(1, 10**6))
def test_pieces_are_all_rows_in_order_and_at_most_64(num_rows: int, num_classes: int) -> None:
    rows = torch.empty(num_rows, num_classes, device="meta")
    pieces = list(cross_entropy.cut(rows))
    assert 1 <= len(pieces) <= 64
    assert [row for piece in pieces for row in range(num_rows)[piece]] == list(range(num_rows))
    (size,) = {piece.stop - piece.start for piece in pieces}
    if size > 1 and size * num_classes * 4 > PIECE_BYTES:  # then smaller pieces would be more than 64
        assert (size - 1) * 64 < num_rows


@pytest.mark.parametrize(("dtype", "digits"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-10)])
def test_gradients_of_16_bits_are_rounded_once(dtype: torch.dtype, digits: float) -> None:
    logits, targets = random_rows(40, 500, dtype)
    (found,) = torch.autograd.grad(judge(logits, targets, label_smoothing=0.1).losses.sum(), logits)
    exact = logits.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy(exact, targets, label_smoothing=0.1, reduction="sum"), exact)
    torch.testing.assert_close(found.double(), expected, rtol=digits, atol=1e-6)


def test_logits_in_another_memory_order_have_the_same_gradient() -> None:
    logits, targets = random_rows(12, 7, torch.float32)
    turned = logits.detach().view(3, 4, 7).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    judge(logits, targets).losses.mean().backward()
    judge(turned, targets.view(3, 4)).losses.mean().backward()
    assert logits.grad is not None and turned.grad is not None
    assert torch.equal(turned.grad.reshape(12, 7), logits.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_as_large_as_the_logits_is_made_but_their_gradient(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        logits = torch.empty(16384, 64_000, dtype=dtype, requires_grad=True)
        targets = torch.empty(16384, dtype=torch.int64)
        with Ledger([logits]) as ledger:
            loss = judge(logits, targets, label_smoothing=0.1, ranks=(1, 5), limit=30.0).losses.mean()
            assert ledger.peak_bytes < 6 * PIECE_BYTES < logits.nbytes / 10
            ledger.start_moments()
            loss.backward()
        assert ledger.peak_bytes < logits.nbytes + 6 * PIECE_BYTES


def test_an_evaluation_makes_no_copy_of_the_logits() -> None:
    metrics, tokens = TokenMetrics(["de", "fr"]), EvaluationMetrics()
    with FakeTensorMode():
        logits = torch.empty(8, 1024, 64_000, dtype=torch.bfloat16)
        targets = {"tokens": torch.empty(8, 1024, dtype=torch.int64), "language": torch.empty(8, dtype=torch.int64)}
        for measure in (lambda: metrics.measure(logits, targets), lambda: tokens.measure(logits, targets["tokens"])):
            with Ledger([logits]) as ledger:
                measure()
            assert ledger.peak_bytes < 6 * PIECE_BYTES < logits.nbytes / 5
