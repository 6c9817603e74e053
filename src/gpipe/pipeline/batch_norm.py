"""Batch norm under micro-batches: normalise by the micro-batch, average over the mini-batch (section 2.2)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

_OUTSIDE, _FORWARD, _RECOMPUTE = "outside", "forward", "recompute"
_phase = _OUTSIDE


@contextmanager
def microbatch_phase(*, recompute: bool) -> Iterator[None]:
    """Make converted batch norms keep their statistics for the step's end; while recomputing, forget them."""
    global _phase
    before, _phase = _phase, _RECOMPUTE if recompute else _FORWARD
    try:
        yield
    finally:
        _phase = before


class MicroBatchNorm(_BatchNorm):
    """What `convert_batch_norm` adds to a batch norm.

    Outside of a pipeline's training step it is the layer that it was. Inside, each micro-batch is normalised by its own
    statistics, the moving averages stay as they are, and `commit` moves them once, to what one update of the plain
    layer on the concatenation of all its inputs would have made of them.
    """

    # Class attributes, so that converting an instance adds nothing to it before its first step.
    seen: tuple[tuple[Tensor, Tensor, int], ...] = ()

    def forward(self, input: Tensor, *args: Any) -> Tensor:  # noqa: A002 - the name that torch gave it
        """Normalise; the shapes are those of the layer that was converted."""
        if _phase is _OUTSIDE or not self.training or self.running_mean is None or self.running_var is None:
            return cast(Tensor, super().forward(input, *args))
        # With a momentum of 1 and buffers of zeros, the plain layer's own update writes the micro-batch's mean and
        # unbiased variance: no second pass over the input, and any subclass's forward will do.
        keep = self.running_mean, self.running_var, self.num_batches_tracked, self.momentum
        self.running_mean, self.running_var = torch.zeros_like(keep[0]), torch.zeros_like(keep[1])
        self.num_batches_tracked, self.momentum = None, 1.0
        try:
            output = cast(Tensor, super().forward(input, *args))
            if _phase is _FORWARD:
                self.seen += ((self.running_mean, self.running_var, input.numel() // input.shape[1]),)
        finally:
            self.running_mean, self.running_var, self.num_batches_tracked, self.momentum = keep
        return output


def convert_batch_norm(module: nn.Module) -> nn.Module:
    """Convert every batch norm below (or at) `module`, in place; names, weights and state_dict stay the same.

    Works on nn.BatchNorm1d, 2d, 3d and on subclasses of them, such as timm's BatchNormAct2d.

    Returns:
        The module itself.
    """
    for child in module.modules():
        if isinstance(child, _BatchNorm) and not isinstance(child, MicroBatchNorm | SyncBatchNorm):
            child.__class__ = _converted(type(child))
    return module


@functools.cache
def _converted(plain: type[_BatchNorm]) -> type[_BatchNorm]:
    return type(f"Micro{plain.__name__}", (MicroBatchNorm, plain), {"__doc__": plain.__doc__})


def converted_batch_norms(modules: Iterable[nn.Module]) -> list[MicroBatchNorm]:
    """Return the converted batch norms below the modules, each once, in their order."""
    found = {id(child): child for module in modules for child in module.modules() if isinstance(child, MicroBatchNorm)}
    return list(found.values())


def discard(norms: Iterable[MicroBatchNorm]) -> None:
    """Forget the statistics of an unfinished step."""
    for norm in norms:
        norm.seen = ()


@torch.no_grad()
def commit(norms: Iterable[MicroBatchNorm], replicas: dist.ProcessGroup | None = None) -> None:
    """Move the moving averages by the statistics of the whole mini-batch, once, and forget those.

    With `replicas`, the mini-batch is that of all replicas: each gets the same moving averages. The statistics are
    combined in float64 around their common mean (Chan et al., 1979), so nothing cancels.
    """
    # A batch norm that saw nothing in one replica may have seen something in another: without replicas it is left out.
    norms = [norm for norm in norms if norm.running_mean is not None and (norm.seen or replicas is not None)]
    moments = [_moments(norm) for norm in norms]
    if replicas is not None and moments:
        moments = _over_replicas(moments, replicas)
    for norm, moment in zip(norms, moments, strict=True):
        _update(norm, moment)
        norm.seen = ()


def _moments(norm: MicroBatchNorm) -> Tensor:
    """Return count, mean and sum of squared deviations, [3, channels] in float64, of what the layer saw."""
    assert norm.running_mean is not None
    if not norm.seen:
        return torch.zeros(3, norm.running_mean.numel(), dtype=torch.float64, device=norm.running_mean.device)
    means = torch.stack([mean for mean, _, _ in norm.seen]).double()
    variances = torch.stack([variance for _, variance, _ in norm.seen]).double()
    counts = torch.tensor([count for _, _, count in norm.seen], dtype=torch.float64, device=means.device)[:, None]
    within = ((counts - 1) * variances).sum(0)
    return _combined(counts.expand_as(means), means, within)


def _combined(counts: Tensor, means: Tensor, within: Tensor) -> Tensor:
    """Combine parts: counts and means are [parts, channels], within the parts' summed squared deviations."""
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total.clamp(min=1)
    return torch.stack([total, mean, within + (counts * (means - mean).square()).sum(0)])


def _over_replicas(moments: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Combine the replicas' moments: one exchange for all layers."""
    mine = torch.cat(moments, dim=1)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    counts, means, within = torch.stack(parts).unbind(1)
    combined = _combined(counts, means, within.sum(0))
    return list(combined.split([moment.shape[1] for moment in moments], dim=1))


def _update(norm: MicroBatchNorm, moments: Tensor) -> None:
    count, mean, deviations = moments
    assert norm.running_mean is not None and norm.running_var is not None
    if not norm.seen and not bool(count[0] > 0):
        return
    factor = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if factor is None:  # a cumulative average, as nn.BatchNorm has it
            factor = 1.0 / float(norm.num_batches_tracked)
    if factor is None:
        factor = 0.0
    for running, value in ((norm.running_mean, mean), (norm.running_var, deviations / (count - 1))):
        running.copy_(running.double().mul_(1 - factor).add_(value, alpha=factor))
