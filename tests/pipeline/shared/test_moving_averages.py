"""Replicas move the averages of batch norms as one model does on all their mini-batches together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gpipe
from tests.pipeline.shared.replica_case import (
    MODES,
    Case,
    Layout,
    assert_close,
    ghostly,
    loss,
    normalized_in_the_middle,
    normalized_layers,
    plain,
    plain_layers,
    whole_batch,
)
from tests.support.process_pool import ProcessPool


@pytest.mark.parametrize("layers", [normalized_layers, normalized_in_the_middle])
def test_moving_averages_are_those_of_one_update_on_everything(
    layers: Callable[[], nn.Sequential], layout: Layout, processes: ProcessPool
) -> None:
    cases = [Case(sizes, mode, 2, layers=layers) for sizes in ((8, 8), (7, 4)) for mode in MODES]
    answers = layout.run(processes, cases)
    for number, case in enumerate(cases):
        expected = plain(case).state
        for outcomes in answers:
            for name, value in outcomes[number].state.items():
                if "running" in name or "tracked" in name:
                    assert_close(value, expected[name], f"{case}, {name}")


def test_a_batch_norm_may_have_more_averages_than_features_beside_an_unused_one(processes: ProcessPool) -> None:
    case = Case((8, 8), num_microbatches=2, layers=ghostly)
    expected = plain(case).state
    for (outcome,) in Layout(1, (5,)).run(processes, [case]):
        for name in ("layers.0.running_mean", "layers.0.running_var"):
            assert_close(outcome.state[name], expected[name], name)


class Sometimes(nn.Module):
    """Normalises where its process wants it to."""

    def __init__(self, *, normalizes: bool) -> None:
        super().__init__()
        self.norm, self.normalizes = nn.BatchNorm1d(6).double(), normalizes

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.normalizes else x


def normalize_in_one_replica(rank: int) -> list[np.ndarray]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))
    layers = gpipe.convert_batch_norm(nn.Sequential(Sometimes(normalizes=rank == 1), *plain_layers()))
    pipeline = gpipe.Pipeline(layers, loss, [6], 2, mesh=mesh, timeout_seconds=10)
    pipeline.train_step(whole_batch(Case((4,)), rank))
    pipeline.close()
    return [average.numpy() for average in pipeline.layers["0"].buffers()]


def test_a_batch_norm_may_be_unused_in_a_replica(processes: ProcessPool) -> None:
    norm = nn.BatchNorm1d(6).double()
    norm(whole_batch(Case((4,)), 1)[0])
    for averages in processes.run(2, normalize_in_one_replica):
        for found, expected in zip(averages, norm.buffers(), strict=True):
            assert_close(found, expected.numpy(), "an average")
