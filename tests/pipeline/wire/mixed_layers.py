"""A small chain of unlike layers over processes, with its images and its loss."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def stages(num_stages: int) -> DeviceMesh:
    return init_device_mesh("cpu", (num_stages,), mesh_dim_names=("stage",))


def images(num_examples: int, size: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(num_examples, 3, size, size, generator=torch.Generator().manual_seed(seed))


def mean_output(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * targets).mean()


class Pool(nn.Module):
    """Passes on what depends on the size of the image, and on the number of those that are bright."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x[x.mean((1, 2, 3)) > 0]


class Unpool(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, bright = pair
        return x.mean((2, 3)) + bright.sum()


def mixed_layers() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 3, 3, padding=1), Pool(), Unpool(), nn.Dropout(0.3), nn.Linear(3, 4), nn.Linear(4, 1)
        )
