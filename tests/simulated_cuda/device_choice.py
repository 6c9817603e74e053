"""What is said to devices on which a pipeline cannot train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gpipe


def _pipeline(layers: nn.Sequential, partitions: list[int], **options: Any) -> gpipe.Pipeline:
    return gpipe.Pipeline(layers, nn.functional.cross_entropy, partitions, 2, timeout_seconds=10, **options)


def choose_none(rank: int, devices: list[str]) -> str:
    """Return where stages of a layer each are, whose layers are on some devices, or what is said to them."""
    layers = nn.Sequential(*(nn.Linear(4, 4, device=device) for device in devices))
    try:
        pipeline = _pipeline(layers, [1] * len(layers))
    except ValueError as error:
        return str(error)
    return ", ".join(str(stage.device) for stage in pipeline.stages.values())


def mix(rank: int, num_replicas: int, num_stages: int) -> str:
    """Return what is said to processes of which the first half is on CPUs and the other one on GPUs."""
    mesh = init_device_mesh("cpu", (num_replicas, num_stages), mesh_dim_names=("replica", "stage"))
    device = "cpu" if 2 * rank < num_replicas * num_stages else f"cuda:{torch.cuda.current_device()}"
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_stages)))
    try:
        _pipeline(layers, [1] * num_stages, mesh=mesh, devices=device)
    except ValueError as error:
        return str(error)
    return ""
