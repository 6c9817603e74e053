"""FLOPs of operations that torch's own counter does not know, or counts wrongly."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe._compat.flop_counts import FlopCounter


def test_attention_and_its_backward_count_their_products() -> None:
    query = torch.zeros(1, 2, 16, 8, requires_grad=True)
    with FlopCounter() as counter:
        output = F.scaled_dot_product_attention(query, query, query)
        forward = counter.total
        output.sum().backward()
    assert forward == 2 * 2 * (2 * 16 * 16 * 8)  # two products, of two heads
    assert counter.total - forward == 5 * forward // 2  # four, and one that is computed again


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d])
def test_convolutions_in_groups_count_their_products(kind: type[nn.Module], stride: int, groups: int) -> None:
    layer = kind(4, 8, 3, stride=stride, groups=groups, bias=False)
    nn.init.ones_(layer.weight)
    x = torch.ones(2, 4, *[7] * (layer.weight.ndim - 2), requires_grad=True)
    with FlopCounter() as counter:
        y = layer(x)
        forward = counter.total
        y.backward(torch.ones_like(y))
    # Where every factor is 1, a sum of products is their number.
    assert forward == 2 * y.sum()
    assert counter.total - forward == 2 * (x.grad.sum() + layer.weight.grad.sum())
