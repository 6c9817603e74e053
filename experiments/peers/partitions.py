"""Compare how each package cuts a model: the slowest partition over the optimum."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gpipe
from experiments.peers.stages import make_stage_layers
from experiments.peers.workloads import Workload
from gpipe.pipeline.partition import partition_ranges
from gpipe.planning.timing import LayerTimer


def compare_partitions(
    workload: Workload, nums_stages: Sequence[int], examples: int, device: torch.device
) -> list[dict[str, Any]]:
    """Return one row per number of stages and choice, from the seconds of a micro-batch of `examples`."""
    layers = nn.Sequential(*make_stage_layers(workload, range(len(workload.layers())), device).values())
    inputs = workload.batch(device)[0][:examples]
    seconds = [sum(timing.seconds[:3]) for timing in LayerTimer(device, 15).time(layers, None, (inputs, None))]
    rows = []
    for num_stages in nums_stages:
        optimum = _find_slowest_seconds(gpipe.partition_layers(seconds, num_stages), seconds)
        for name, partitions in _choose_partitions(workload, layers, inputs, num_stages, device).items():
            row = {"model": workload.title, "num_stages": num_stages, "chosen_by": name, "partitions": partitions}
            slowest = None if partitions is None else _find_slowest_seconds(partitions, seconds) / optimum
            rows.append(row | {"slowest_over_optimum": slowest})
    return rows


def _choose_partitions(
    workload: Workload, layers: nn.Sequential, inputs: Tensor, num_stages: int, device: torch.device
) -> dict[str, list[int] | None]:
    """Return the partitions that each package chooses; None if it cannot on this device."""
    from torchgpipe.balance import balance_by_size, balance_by_time

    costs, timed = gpipe.analyze_layers(workload.layers(), inputs), gpipe.measure_layers(layers, inputs)
    share, rest = divmod(len(layers), num_stages)
    sample = inputs if inputs.is_floating_point() else inputs.clone()
    on_gpu = device.type == "cuda"
    return {
        "ours, by FLOPs": gpipe.partition_layers([cost.flops for cost in costs], num_stages),
        "ours, by time": gpipe.partition_layers([cost.seconds or 0.0 for cost in timed], num_stages),
        "torchgpipe, by time": balance_by_time(num_stages, layers, sample, device=device),
        "torchgpipe, by size": balance_by_size(num_stages, layers, sample, device=device) if on_gpu else None,
        "torch, equal numbers of layers": [share + (k < rest) for k in range(num_stages)],
    }


def _find_slowest_seconds(partitions: Sequence[int], seconds: Sequence[float]) -> float:
    return max(sum(seconds[i] for i in part) for part in partition_ranges(partitions))
