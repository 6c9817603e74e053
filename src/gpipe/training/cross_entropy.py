"""Compute, in one pass over logits, each target's loss, its likelihood, and whether it was predicted.

With a large vocabulary, logits are a model's largest tensor. They are read piece by piece, in their own precision: only
one piece at a time is widened to float32, and only its figures are kept. Only the logits are saved for the backward
pass, which recomputes the softmax of each piece, and from it that piece of the gradient.

Each row is computed by itself and has its own figures, so the bits do not depend on the pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

PIECE_BYTES = 2**25
"""The size of a piece in float32. With 64,000 tokens it has 131 rows, about one per multiprocessor of a large GPU."""
_MOST_PIECES = 64  # more would cost time to launch; a 64th of logits of 2 GiB or more is little memory


class Judgement(NamedTuple):
    """The figures of n targets; all but the losses are detached.

    Attributes:
        losses: [n], in nats, with smoothed labels; float32 or wider.
        nll: [n], the losses without smoothing.
        correct: bool [n] for each requested rank k: whether the target is among the k largest logits.
        num_at_limit: int32 [n], the number of its logits at or beyond the limit; None without a limit.
    """

    losses: Tensor
    nll: Tensor
    correct: tuple[Tensor, ...]
    num_at_limit: Tensor | None


def judge(
    logits: Tensor,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    ranks: Sequence[int] = (1,),
    limit: float | None = None,
) -> Judgement:
    """Return the figures of each target, without waiting for the device.

    Args:
        logits: [..., classes].
        targets: class indices [...], on the same device; n in all.
        label_smoothing: the share of each target that is spread over all classes.
        ranks: the ranks k of `correct`, at most the number of classes.
        limit: logits of this magnitude or more count in `num_at_limit`.
    """
    rows, classes = logits.flatten(0, -2), targets.flatten()
    figures = _Judge.apply(rows, classes, label_smoothing, tuple(ranks), limit)  # type: ignore[no-untyped-call]
    losses, nll, *correct = figures[: 2 + len(ranks)]
    return Judgement(losses, nll, tuple(correct), None if limit is None else figures[-1])


def choose_ranks(num_classes: int) -> tuple[int, ...]:
    """Return the ranks k for which top-k accuracy is useful: 1 and, with 5 classes or more, 5."""
    return (1, 5) if num_classes >= 5 else (1,)


def find_correct(logits: Tensor, targets: Tensor, ranks: Sequence[int]) -> tuple[Tensor, ...]:
    """Return whether each target [...] is among the k largest logits [..., classes], for each k in `ranks`."""
    return _compare(logits.topk(max(ranks), dim=-1).indices, targets, ranks)


def _compare(largest: Tensor, targets: Tensor, ranks: Sequence[int]) -> tuple[Tensor, ...]:
    hits = largest == targets[..., None]
    return tuple(hits[..., :rank].any(dim=-1) for rank in ranks)


def find_labelled(logits: Tensor, targets: Tensor) -> Tensor:
    """Return whether each image's likeliest class is one of its labels: both [n, classes] -> bool [n]."""
    return targets.gather(1, logits.argmax(1, keepdim=True)).squeeze(1) > 0


def widen_type(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for 16-bit types, which have too few digits for a sum over classes; wider types stay."""
    return torch.promote_types(dtype, torch.float32)


class _Judge(torch.autograd.Function):
    """The figures of rows of logits; only the losses are differentiable."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, targets: Tensor, smoothing: float, ranks: Sequence[int], limit: float | None
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rows, targets)
        ctx.smoothing = smoothing
        ctx.set_materialize_grads(False)
        # Large operations run per piece, small ones on all rows at once.
        pieces = [_read(rows[piece], targets[piece], max(ranks), limit, averages=smoothing > 0) for piece in cut(rows)]
        logarithms, largest, *others = (torch.cat(found) for found in zip(*pieces, strict=True))
        nll = -logarithms.squeeze(1)
        losses = (1.0 - smoothing) * nll
        if smoothing > 0:
            losses -= smoothing * others.pop(0)
        figures = [nll, *_compare(largest, targets, ranks), *others]
        ctx.mark_non_differentiable(*figures)
        return losses, *figures

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 4
        if weights is None:
            return None, *nothing
        rows, targets = ctx.saved_tensors
        wide = widen_type(rows.dtype)
        weights, classes = weights.to(wide)[:, None], targets[:, None]
        of_all_classes = weights * (-ctx.smoothing / rows.shape[1])
        of_target = torch.full_like(weights, ctx.smoothing - 1.0)
        gradient = torch.empty_like(rows)
        for piece in cut(rows):
            found = F.softmax(rows[piece], -1, dtype=wide).scatter_add_(1, classes[piece], of_target[piece])
            # Rounded to 16 bits only once, here.
            torch.addcmul(of_all_classes[piece], found, weights[piece], out=gradient[piece])
        return gradient, *nothing


def _read(rows: Tensor, targets: Tensor, rank: int, limit: float | None, *, averages: bool) -> list[Tensor]:
    """Return, for each row, the logarithm of the target's softmax and the classes of the largest logits.

    With `averages`, also the mean of all logarithms; with a limit, also the number of logits at or beyond it.
    """
    logarithms = F.log_softmax(rows, -1, dtype=widen_type(rows.dtype))
    found = [logarithms.gather(1, targets[:, None]), rows.topk(rank).indices]
    if averages:
        found.append(logarithms.mean(1))
    if limit is not None:
        found.append((rows.abs() >= limit).sum(1, dtype=torch.int32))
    return found


def cut(rows: Tensor) -> Iterator[slice]:
    """Yield the rows of each piece; without rows, one empty piece."""
    length = PIECE_BYTES // (rows.shape[1] * widen_type(rows.dtype).itemsize)
    length = max(1, length, -(-len(rows) // _MOST_PIECES))
    for start in range(0, max(1, len(rows)), length):
        yield slice(start, start + length)
