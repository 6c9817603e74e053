"""The end of a step for batch norms: the micro-batches' statistics move the averages once, as one mini-batch would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe.pipeline._compat import add_to_each, copy_to_each
from gpipe.pipeline.batch_norm import MicroBatchNorm, discard

if TYPE_CHECKING:
    from gpipe.pipeline.shared.replicas import Replicas


@torch.no_grad()
def commit(norms: Sequence[MicroBatchNorm], replicas: Replicas | None = None) -> None:
    """Move the moving averages once, by the statistics of the whole mini-batch, and forget the statistics.

    They are combined in float64, for all layers of a device at once: one by one, the overhead of small vectors would
    exceed the work.

    Args:
        norms: of one or more devices; with several replicas, of one.
        replicas: the processes that hold the same layers. The mini-batch is then that of all replicas, and each gets
            the same moving averages.

    Raises:
        LostPeer, PipelineError: another replica is gone, has failed or hangs.
    """
    has_others = replicas is not None and replicas.count > 1
    by_device: dict[torch.device, list[MicroBatchNorm]] = {}
    for norm in norms:
        # A batch norm that was unused in one replica may have been used in another.
        running_mean = norm._buffers["running_mean"]
        if running_mean is not None and (norm.seen or has_others):
            by_device.setdefault(running_mean.device, []).append(norm)
    for group in by_device.values():
        moments = _compute_moments(group)
        if replicas is not None and has_others:  # one exchange for all layers
            parts = [torch.empty_like(moments) for _ in range(replicas.count)]
            with replicas.exchange():
                dist.all_gather(parts, moments, group=replicas.group)
            if not all(norm.seen for norm in group):  # `_update` then reads numbers
                replicas.wait_for_devices()
            counts, means, within = torch.stack(parts).unbind(1)
            moments = combine(counts, means, within.sum(0))
        _update(group, moments)
    discard(norms)


def _compute_moments(norms: Sequence[MicroBatchNorm]) -> Tensor:
    """Return count, mean and sum of squared deviations of what each layer saw: [3, channels of all] in float64."""
    by_length: dict[int, list[int]] = {}
    for position, norm in enumerate(norms):
        by_length.setdefault(len(norm.seen) // 2, []).append(position)
    found: dict[int, Tensor] = {}
    for length, positions in by_length.items():
        group = [norms[position] for position in positions]
        sizes = [_get_averages(norm)[0].numel() for norm in group]
        device = _get_averages(group[0])[0].device
        if length == 0:
            together = torch.zeros(3, sum(sizes), dtype=torch.float64, device=device)
        else:
            tables = [norm.seen[2 * part] for part in range(length) for norm in group]
            means, variances = torch.cat(tables, dim=1).double().view(2, length, sum(sizes))
            per_layer = [[norm.seen[2 * part + 1] for norm in group] for part in range(length)]
            counts = _spread(per_layer, sizes, device)
            together = combine(counts, means, ((counts - 1) * variances).sum(0))
        if len(by_length) == 1:
            return together
        found.update(zip(positions, together.split(sizes, dim=1), strict=True))
    return torch.cat([found[position] for position in range(len(norms))], dim=1)


def combine(counts: Tensor, means: Tensor, within: Tensor) -> Tensor:
    """Combine parts around their common mean, so that nothing cancels (Chan et al., 1979).

    Args:
        counts: of each part: [parts, channels].
        means: likewise.
        within: the squared deviations from each part's own mean, summed over all parts: [channels].

    Returns:
        Count, mean and sum of squared deviations: [3, channels].
    """
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total.clamp(min=1)
    return torch.stack([total, mean, within + (counts * (means - mean).square()).sum(0)])


def _update(norms: Sequence[MicroBatchNorm], moments: Tensor) -> None:
    sizes = [_get_averages(norm)[0].numel() for norm in norms]
    count, mean, deviations = moments
    if not all(norm.seen for norm in norms):  # only with replicas: drop layers that no replica used
        kept = count > 0
        used = kept[[sum(sizes[:k]) for k in range(len(sizes))]].tolist()
        norms, moments = [norm for norm, is_used in zip(norms, used, strict=True) if is_used], moments[:, kept]
        sizes, (count, mean, deviations) = [_get_averages(norm)[0].numel() for norm in norms], moments
    if not norms:
        return
    factors = _spread([_count_step(norms)], sizes, count.device)[0]
    means, variances = zip(*(_get_averages(norm) for norm in norms), strict=True)
    values = torch.stack([mean, deviations / (count - 1)])
    moved = torch.lerp(torch.cat(means + variances).double().view_as(values), values, factors)
    copy_to_each(means + variances, moved.view(-1).split(sizes * 2))


def _count_step(norms: Sequence[MicroBatchNorm]) -> list[float]:
    """Count the step and return the weights of its statistics in the moving averages, as nn.BatchNorm has them."""
    counters = [norm._buffers["num_batches_tracked"] for norm in norms]
    if tracked := [counter for counter in counters if counter is not None]:
        add_to_each(tracked, 1)
    # Without a momentum nn.BatchNorm keeps the average of all steps.
    return [
        norm.momentum if norm.momentum is not None else 0.0 if counter is None else 1.0 / float(counter)
        for norm, counter in zip(norms, counters, strict=True)
    ]


def _get_averages(norm: MicroBatchNorm) -> tuple[Tensor, Tensor]:
    mean, variance = norm._buffers["running_mean"], norm._buffers["running_var"]
    assert mean is not None and variance is not None
    return mean, variance


def _spread(rows: list[list[float]], sizes: list[int], device: torch.device) -> Tensor:
    """Repeat each layer's number for its channels: [rows, layers] -> [rows, channels of all]."""
    values = torch.tensor(rows, device="cpu", dtype=torch.float64)  # whatever the user's default device is
    repeats = torch.tensor(sizes, device="cpu", dtype=torch.int64)
    return values.repeat_interleave(repeats, dim=1).to(device, non_blocking=True)
