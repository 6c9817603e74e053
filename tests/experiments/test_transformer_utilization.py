"""The FLOPs that utilisation counts."""

import pytest

from experiments.transformer_utilization import FEEDFORWARD_SIZE, MODEL_SIZE, count_forward_flops


@pytest.mark.parametrize(("num_layers", "batch", "time_steps"), [(1, 1, 32), (3, 2, 64)])
def test_the_flops_of_a_layer_are_those_of_its_products(num_layers: int, batch: int, time_steps: int) -> None:
    weights = 4 * MODEL_SIZE**2 + 2 * MODEL_SIZE * FEEDFORWARD_SIZE
    attention = 2 * time_steps * MODEL_SIZE  # every query with every key, and their weights with every value
    expected = num_layers * batch * time_steps * 2 * (weights + attention)
    assert count_forward_flops(num_layers, batch, time_steps) == expected
