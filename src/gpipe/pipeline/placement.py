"""Which stage goes to which device, and what two stages cannot share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

Devices: TypeAlias = "Sequence[torch.device | str] | torch.device | str | None"
"""One a stage, or one for all; None for the default."""


def refuse_shared_parameters(layers: nn.Sequential, ranges: Sequence[range]) -> None:
    """Refuse a parameter that two partitions would hold, or that would lose its tie on the meta device.

    Raises:
        ValueError: naming the parameter's two places.
    """
    owners: dict[int, tuple[int, int, str]] = {}
    for stage, indices in enumerate(ranges):
        for index in indices:
            for name, parameter in layers[index].named_parameters():
                first_stage, first_index, first_name = owners.setdefault(id(parameter), (stage, index, name))
                both = f"layers.{first_index}.{first_name} and layers.{index}.{name} are one parameter"
                if first_stage != stage:
                    raise ValueError(
                        f"{both}, which stages {first_stage} and {stage} would both train; put both layers into one "
                        "partition, or untie them"
                    )
                if parameter.is_meta and first_index != index:
                    raise ValueError(
                        f"{both} on the meta device, and would lose the tie on the way to a real one; build these "
                        "layers on the CPU, or untie them"
                    )


def local_devices(devices: Devices, layers: nn.Module, num_stages: int) -> list[torch.device]:
    """Return the device of each stage in a process that plays all of them; by default where the layers are.

    Raises:
        ValueError: there are not as many devices as stages.
    """
    if devices is None:
        first = next(layers.parameters(), torch.empty(0))
        devices = "cpu" if first.is_meta else first.device
    if isinstance(devices, str | torch.device):
        devices = [devices] * num_stages
    if len(devices) != num_stages:
        raise ValueError(
            f"{len(devices)} devices for {num_stages} stages; give one a stage (the same one may stand there several "
            "times), or a single one for all"
        )
    return [_indexed(torch.device(device)) for device in devices]


def process_device(devices: Devices, mesh: DeviceMesh) -> torch.device:
    """Return the device of one process of a mesh; by default the current one of the mesh's type.

    Raises:
        ValueError: several devices are given.
    """
    if devices is None:
        devices = mesh.device_type
    if isinstance(devices, str | torch.device):
        return _indexed(torch.device(devices))
    raise ValueError(f"{len(devices)} devices for one process of a mesh; give the device of this process alone")


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
