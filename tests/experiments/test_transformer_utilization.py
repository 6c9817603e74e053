"""The FLOPs that utilisation counts."""

import pytest

from experiments.transformer_utilization import WIDENING, count_forward_flops


@pytest.mark.parametrize(("num_layers", "batch", "time_steps", "width"), [(1, 1, 32, 2048), (3, 2, 64, 128)])
def test_the_flops_of_a_layer_are_those_of_its_products(
    num_layers: int, batch: int, time_steps: int, width: int
) -> None:
    weights = (4 + 2 * WIDENING) * width**2
    attention = 2 * time_steps * width  # every query with every key, and their weights with every value
    expected = num_layers * batch * time_steps * 2 * (weights + attention)
    assert count_forward_flops(num_layers, batch, time_steps, width) == expected
