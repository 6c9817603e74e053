"""A batch norm with more moving averages than features."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Ghost(nn.BatchNorm2d):
    """Normalises each half of the examples by itself, with moving averages of its own (Hoffer et al., 2017)."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.running_mean, self.running_var = torch.zeros(2 * num_features), torch.ones(2 * num_features)
        self.num_batches_tracked = None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.repeat(2), self.bias.repeat(2)
        halves = x.view(-1, len(self.running_mean), *x.shape[2:])
        averages = self.running_mean, self.running_var
        return F.batch_norm(halves, *averages, weight, bias, True, self.momentum).view(x.shape)
