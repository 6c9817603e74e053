"""Planned memory beside what a real step allocates, stage by stage."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from experiments.stage_accounting import Accounting, ProcessorAllocator
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.models import amoebanet_d, transformer_lm
from gpipe.pipeline.schedule import Kind, Rematerialize, Task
from gpipe.planning.cut import partition_by_memory
from gpipe.planning.forecast import Setting, plan_memory
from gpipe.planning.memory import DeviceMemory, StageMemory, device_memory, stage_memory
from gpipe.planning.profile import LayerProfile, profile_layers

TOLERANCE = 0.1
SIZE = 16  # of a mini-batch


def images() -> tuple[nn.Sequential, Callable[[Tensor, Tensor], Tensor], Callable[[int], tuple[Tensor, Tensor]]]:
    layers = amoebanet_d(3, 64, 10, image_size=64, auxiliary_head=False)
    return gpipe.convert_batch_norm(layers), F.cross_entropy, lambda n: (torch.randn(n, 3, 64, 64), torch.arange(n) % 10)


def text() -> tuple[nn.Sequential, Callable[[Tensor, Tensor], Tensor], Callable[[int], tuple[Tensor, Tensor]]]:
    layers = transformer_lm(4, vocabulary_size=1000, model_size=128, feedforward_size=512, num_heads=4, dropout=0.1)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return layers, loss, lambda n: (torch.randint(1000, (n, 64)), torch.randint(1000, (n, 64)))


MODELS = {"amoebanet": images, "transformer": text}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Each model, with its profile for micro-batches of 4."""
    found = {}
    for name, make in MODELS.items():
        layers, loss, batch = make()
        found[name] = layers, loss, batch, profile_layers(layers, loss, batch(4))
    return found


@pytest.mark.parametrize("mode", list(Rematerialize))
@pytest.mark.parametrize("partitions", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("model", list(MODELS))
def test_a_stages_planned_peak_is_within_a_tenth_of_the_allocators(
    models: dict[str, Any], model: str, schedule: str, partitions: int, mode: Rematerialize
) -> None:
    layers, loss, batch, profiles = models[model]
    setting = Setting(partitions, SIZE // 4, mode, schedule)
    cut = partition_by_memory(profiles, setting)
    pipeline = gpipe.Pipeline(layers, loss, cut, SIZE // 4, rematerialize=mode.value, schedule=schedule)
    optimizer = torch.optim.RMSprop(pipeline.parameters())
    pipeline.train_step(batch(SIZE))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    measured_peaks = Accounting(pipeline, optimizer, ProcessorAllocator()).step(batch(SIZE))

    planned = plan_memory(profiles, cut, setting)
    for measured, found in zip(measured_peaks, planned, strict=True):
        assert found.peak_bytes == pytest.approx(measured, rel=TOLERANCE)
