"""A synchronised batch norm does what torch's own does; the kernels of that one are for GPUs, and here in Python."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch import library as operators
from torch.nn.modules._functions import SyncBatchNorm

import gpipe
from gpipe.pipeline.batch_norm import microbatch_phase
from gpipe.pipeline.step_end.moving_statistics import commit
from tests.pipeline.shared.synchronized_case import (
    Layout,
    mean_loss,
    mesh_of,
)
from tests.support.process_pool import ProcessPool


def _view(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 2))


def _over_channels(x: Tensor) -> list[int]:
    return [dimension for dimension in range(x.ndim) if dimension != 1]


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x, _over_channels(x), correction=0)
    return mean, (variance + eps).rsqrt()


def gather_stats(
    x: Tensor,
    means: Tensor,
    inverses: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    weights = counts[:, None] / counts.sum()
    mean = (weights * means).sum(0)
    variance = (weights * (inverses**-2 - eps + (means - mean) ** 2)).sum(0)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(variance * counts.sum() / (counts.sum() - 1), momentum)
    return mean, (variance + eps).rsqrt()


def elements(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, eps: float
) -> Tensor:
    y = (x - _view(mean, x)) * _view(inverse, x)
    return y if weight is None or bias is None else y * _view(weight, x) + _view(bias, x)


def reduce_backward(
    dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sum_dy = dy.sum(_over_channels(x))
    sum_dy_xmu = (dy * (x - _view(mean, x))).sum(_over_channels(x))
    return sum_dy, sum_dy_xmu, sum_dy_xmu * inverse, sum_dy.clone()


def elements_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    total = counts.sum()
    centered = dy - _view(sum_dy / total, x) - (x - _view(mean, x)) * _view(inverse**2 * sum_dy_xmu / total, x)
    return centered * _view(inverse if weight is None else inverse * weight, x)


KERNELS = {
    "batch_norm_stats": stats,
    "batch_norm_gather_stats_with_counts": gather_stats,
    "batch_norm_elemt": elements,
    "batch_norm_backward_reduce": reduce_backward,
    "batch_norm_backward_elemt": elements_backward,
}


@dataclass(frozen=True)
class Part:
    """One batch norm, and how many examples each replica gives it."""

    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    affine: bool
    momentum: float
    channels_last: bool
    dtype: torch.dtype = torch.float64


def beside_torchs(rank: int, parts: list[Part]) -> list[dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Return what our batch norm made of each part, beside what torch's SyncBatchNorm did."""
    library = operators.Library("aten", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "CPU")
    mesh = mesh_of(Layout((1,)), num_replicas=len(parts[0].sizes))
    try:
        return [_beside_torchs(rank, part, mesh) for part in parts]
    finally:
        library._destroy()


def _beside_torchs(rank: int, part: Part, mesh: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}[len(part.shape)]
    generator = torch.Generator().manual_seed(1)
    whole, gradients = (
        torch.randn(sum(part.sizes), *part.shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    x, dy = (tensor.split(part.sizes)[rank].to(part.dtype) for tensor in (whole * 3 + 2, gradients))
    if part.channels_last:
        x, dy = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, dy))
    torchs = kind(part.shape[0], affine=part.affine, momentum=part.momentum).to(part.dtype)
    for number, parameter in enumerate(torchs.parameters()):
        torch.nn.init.uniform_(parameter, 0.5 + number, 2, generator=generator)
    ours = gpipe.convert_batch_norm(copy.deepcopy(torchs))
    pipeline = gpipe.Pipeline(
        nn.Sequential(ours), mean_loss, [1], mesh=mesh, timeout_seconds=10, synchronize_batch_norm=True
    )
    exchange = pipeline.stages[0].exchange
    assert exchange is not None
    ours_x, torchs_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    with microbatch_phase([ours], recompute=False, synchronized=exchange.start()):
        ours_y = ours(ours_x)
    ours_y.backward(dy)
    commit([ours], pipeline.job.replicas)
    torchs_y = SyncBatchNorm.apply(
        torchs_x, torchs.weight, torchs.bias, torchs.running_mean, torchs.running_var, torchs.eps, part.momentum,
        dist.group.WORLD, len(part.sizes),
    )  # fmt: skip
    torchs_y.backward(dy)
    pairs = {"output": (ours_y, torchs_y)}
    pairs |= {name: (getattr(ours, name), getattr(torchs, name)) for name in ("running_mean", "running_var")}
    if len(x):  # of an empty part torch gives no gradients
        pairs |= {"gradient of input": (ours_x.grad, torchs_x.grad)}
        pairs |= {f"gradient of {name}": (p.grad, getattr(torchs, name).grad) for name, p in ours.named_parameters()}
    pipeline.close()
    return {name: tuple(tensor.detach().numpy().copy() for tensor in pair) for name, pair in pairs.items()}


def parts(num_replicas: int) -> st.SearchStrategy[Part]:
    shapes = st.sampled_from([(3,), (3, 5), (3, 4, 4), (3, 2, 2, 2)])
    drawn = st.tuples(st.tuples(*[st.integers(0, 5)] * num_replicas), shapes)
    enough = drawn.filter(lambda found: sum(found[0]) * int(np.prod(found[1][1:])) > 1)

    def finish(found: tuple[tuple[int, ...], tuple[int, ...]]) -> st.SearchStrategy[Part]:
        sizes, shape = found
        channels_last = st.booleans() if len(shape) == 3 else st.just(False)
        return st.builds(Part, st.just(sizes), st.just(shape), st.booleans(), st.floats(0.0, 1.0), channels_last)

    return enough.flatmap(finish)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.data(), st.sampled_from((2, 3)))
def test_a_batch_norm_does_what_torchs_does(processes: ProcessPool, data: st.DataObject, num_replicas: int) -> None:
    drawn = data.draw(st.lists(parts(num_replicas), min_size=8, max_size=8))
    for rank, answers in enumerate(processes.run(num_replicas, beside_torchs, drawn)):
        for part, pairs in zip(drawn, answers, strict=True):
            for name, (found, expected) in pairs.items():
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12, err_msg=f"{part}, rank {rank}, {name}")


# What else a layer, a step and a pipeline may be.
