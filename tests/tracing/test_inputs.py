"""A model that was cut takes what its example was, nested so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gpipe


@pytest.mark.parametrize(
    ("example", "inputs", "said"),
    [
        ((torch.zeros(2, 3),), torch.zeros(2, 3), "one value, but the example was a tuple of 1"),
        ((torch.zeros(2, 3),), (torch.zeros(2, 3),) * 2, "a tuple of 2, but the example was a tuple of 1"),
        (torch.zeros(2, 3), (torch.zeros(2, 3),), "a tuple of 1, but the example was one value"),
        ({"input": torch.zeros(2, 3)}, {"y": torch.zeros(2, 3)}, "a dict of y, but the example was a dict of input"),
    ],
)
def test_inputs_that_are_nested_in_another_way_than_the_example_are_refused(
    example: Any, inputs: Any, said: str
) -> None:
    layers = gpipe.as_layers(nn.Sequential(nn.Linear(3, 3)), example)
    with pytest.raises(ValueError, match=rf"^the model's input is {said}; give it so$"):
        layers(inputs)
