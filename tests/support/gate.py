"""A layer that leaves its weight out of some micro-batches."""

import torch
from torch import Tensor, nn


class Gate(nn.Module):
    """Adds its weight to the examples whose first feature exceeds 10; without such examples, does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, :1] > 10
        return torch.where(chosen, x * self.weight * 0.1, x) if bool(chosen.any()) else x
