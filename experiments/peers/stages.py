"""Inputs of the peers: a stage's layers with our engine's initial weights, and the shapes at its boundaries."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from experiments.peers.workloads import Workload
from gpipe.pipeline.layers.initialization import materialize
from gpipe.pipeline.partition import partition_ranges

SEED = 0


class Recomputed(nn.Module):
    """Layers that keep only their input until the backward pass."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, *payload: Tensor) -> Any:
        """Run the layers; torch's stage passes a tuple as several arguments."""
        value = payload[0] if len(payload) == 1 else payload
        return checkpoint(self.layers, value, use_reentrant=False)


def make_stage_layers(workload: Workload, indices: range, device: torch.device) -> dict[int, nn.Module]:
    """Return layers with the weights that our engine draws for them."""
    layers = workload.layers()
    return {i: materialize(layers[i], i, SEED, device) for i in indices}


def make_boundaries(
    workload: Workload, partitions: Sequence[int], num_microbatches: int, device: torch.device
) -> list[tuple[Tensor, ...]]:
    """Return tensors like a micro-batch's before each stage and after the last; their values mean nothing."""
    layers, value = workload.layers(), workload.batch("meta")[0].chunk(num_microbatches)[0]
    found = []
    for part in [range(0), *partition_ranges(partitions)]:
        for i in part:
            value = layers[i](value)
        tensors = (value,) if isinstance(value, Tensor) else value
        found.append(
            tuple(torch.empty_like(one, device=device, requires_grad=one.is_floating_point()) for one in tensors)
        )
    return found
