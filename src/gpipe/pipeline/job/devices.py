"""Which device each stage has."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

Devices: TypeAlias = "Sequence[torch.device | str] | torch.device | str | None"
"""One per stage, or one for all; None for the default."""


def choose_devices(devices: Devices, layers: nn.Module, num_stages: int) -> dict[int, torch.device]:
    """Return the device of each stage in a process that plays all of them; by default where the layers are.

    Raises:
        ValueError: there is neither one device per stage nor one for all, or layers are on several devices.
    """
    if devices is None:
        devices, *others = sorted({str(one.device) for one in layers.parameters() if not one.is_meta}) or ["cpu"]
        if others:
            raise ValueError(
                f"the layers are on {', '.join([devices, *others])}, and no devices are given; set devices, one per "
                "stage or one for all"
            )
    if isinstance(devices, str | torch.device):
        devices = [devices] * num_stages
    if len(devices) != num_stages:
        raise ValueError(
            f"{len(devices)} devices for {num_stages} stages; give one per stage (the same one may appear several "
            "times), or one for all"
        )
    return {stage: _with_index(torch.device(device)) for stage, device in enumerate(devices)}


def choose_device(devices: Devices, mesh: DeviceMesh) -> torch.device:
    """Return the device of one process of a mesh; by default the current one of the mesh's type.

    Raises:
        ValueError: `devices` has several.
    """
    if devices is None:
        devices = mesh.device_type
    if isinstance(devices, str | torch.device):
        return _with_index(torch.device(devices))
    raise ValueError(f"{len(devices)} devices for one process of a mesh; give the device of this process alone")


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"devices has {device}, but torch sees no GPU here; install torch for CUDA, or use 'cpu'")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
