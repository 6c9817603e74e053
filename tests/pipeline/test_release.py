"""A pipeline that nobody has any more leaves its memory, whoever refers to whom."""

import gc
import weakref

import pytest
import torch
from torch import nn

import gpipe


class Owned(nn.Linear):
    """A layer that knows its pipeline."""

    owner: list[gpipe.Pipeline]


@pytest.mark.parametrize("rematerialize", ["always", "never"])
def test_a_pipeline_that_its_layer_refers_to_is_released(rematerialize: str) -> None:
    layers = nn.Sequential(Owned(3, 3), nn.Linear(3, 3))
    pipeline = gpipe.Pipeline(layers, nn.functional.mse_loss, [1, 1], 2, rematerialize=rematerialize)
    pipeline.layers["0"].owner = [pipeline]  # a module would become a part of the layer
    pipeline.train_step((torch.ones(4, 3), torch.ones(4, 3)))
    found = [weakref.ref(pipeline), *map(weakref.ref, pipeline.layers.parameters()), weakref.ref(pipeline.job)]
    del pipeline, layers
    gc.collect()
    assert [reference() for reference in found] == [None] * len(found)
