"""The estimated statistics equal those that the plain layers find in the same mini-batches."""

import copy
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from gpipe.pipeline.engine import Pipeline
from gpipe.training.statistics import estimate_statistics
from tests.support.process_pool import ProcessPool
from tests.training.small_run import NUM_LAYERS, RandomImages, small_layers, small_trainer

NUM_BATCHES = 3


class SharedImages(RandomImages):
    """Gives each replica every other image of a mini-batch."""

    def __init__(self, replica_index: int, num_replicas: int) -> None:
        super().__init__(24, 6)
        self._part = slice(replica_index, None, num_replicas)

    def __iter__(self) -> Any:
        for images, labels in super().__iter__():
            assert images is not None
            yield images[self._part], labels[self._part]


def pipeline_of(partitions: list[int], num_microbatches: int = 2, **settings: Any) -> Pipeline:
    return Pipeline(small_layers(), F.cross_entropy, partitions, num_microbatches, **settings)


def statistics_of(layers: nn.ModuleDict) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in layers.state_dict().items() if "running" in name}


def plain_statistics(layers: nn.ModuleDict) -> dict[str, Tensor]:
    """Return the means over the first mini-batches, by torch's own update."""
    plain = nn.Sequential(*copy.deepcopy(layers).values()).eval()
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.train()
            module.reset_running_stats()
            module.momentum = None
    loader = SharedImages(0, 1)
    with torch.no_grad():
        for images, _ in islice(loader, NUM_BATCHES):
            plain(images)
    return {name: value for name, value in plain.state_dict().items() if "running" in name}


@pytest.mark.parametrize("substituted", [False, True])
def test_the_statistics_are_those_of_the_plain_layers_and_nothing_else_changes(substituted: bool) -> None:
    pipeline = pipeline_of([2, 4], num_microbatches=1)
    pipeline.train_step(next(iter(RandomImages())))
    pipeline.layers["1"].eval()  # as a user's frozen layer is
    layers = copy.deepcopy(pipeline.layers).eval() if substituted else pipeline.layers
    before = copy.deepcopy(layers)
    momentums = [norm.momentum for norm in pipeline.batch_norms(layers)]
    loader = SharedImages(0, 1)
    estimate_statistics(pipeline, loader, NUM_BATCHES, layers)
    expected = plain_statistics(before)
    for name, value in layers.state_dict().items():
        other = expected.get(name)
        if other is None:
            assert torch.equal(value, before.state_dict()[name]), name
        else:
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
    assert [norm.momentum for norm in pipeline.batch_norms(layers)] == momentums
    after, earlier = layers.modules(), before.modules()
    assert [module.training for module in after] == [module.training for module in earlier]
    assert (loader.num_fetched, loader.num_closed) == (NUM_BATCHES, 1)


def test_a_frozen_norm_keeps_its_statistics() -> None:
    pipeline = pipeline_of([NUM_LAYERS])
    pipeline.layers["0"].eval()
    before = statistics_of(pipeline.layers)
    estimate_statistics(pipeline, RandomImages(), NUM_BATCHES)
    for name, value in statistics_of(pipeline.layers).items():
        assert torch.equal(value, before[name]) == name.startswith("0."), name


def estimated_in_process(_: int, num_replicas: int, synchronize: bool) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    num_stages = dist.get_world_size() // num_replicas
    mesh = init_device_mesh("cpu", (num_replicas, num_stages), mesh_dim_names=("replica", "stage"))
    partitions = [1] * (num_stages - 1) + [NUM_LAYERS - num_stages + 1]
    pipeline = pipeline_of(partitions, 1, mesh=mesh, synchronize_batch_norm=synchronize)
    layers = copy.deepcopy(pipeline.layers).eval()
    loader = SharedImages(pipeline.job.replica_index, num_replicas)
    estimate_statistics(pipeline, loader, NUM_BATCHES, layers)
    pipeline.close()
    return statistics_of(layers)


@pytest.mark.slow
@pytest.mark.parametrize(("num_replicas", "num_stages", "synchronize"), [(1, 3, False), (2, 1, True), (2, 2, True)])
def test_processes_find_what_one_finds(
    processes: ProcessPool, num_replicas: int, num_stages: int, synchronize: bool
) -> None:
    alone = pipeline_of([NUM_LAYERS], num_microbatches=1)
    estimate_statistics(alone, SharedImages(0, 1), NUM_BATCHES)
    expected = statistics_of(alone.layers)
    for found in processes.run(num_replicas * num_stages, estimated_in_process, num_replicas, synchronize):
        for name, value in found.items():
            if num_replicas == 1:
                assert torch.equal(value, expected[name]), name
            else:
                torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_an_estimate_before_each_evaluation_judges_a_short_run_by_its_weights(tmp_path: Path) -> None:
    losses, weights = {}, {}
    for num_batches in (None, 4):
        settings = {"statistics_loader": RandomImages(), "num_statistics_batches": num_batches}
        trainer = small_trainer(tmp_path / str(num_batches), max_steps=6, **settings)
        losses[num_batches] = trainer.train().evaluation["test"]
        weights[num_batches] = dict(trainer.pipeline.named_parameters())
    assert all(torch.equal(value, weights[4][name]) for name, value in weights[None].items())
    for figure in ("loss", "raw_loss"):
        assert losses[4][figure] < losses[None][figure]
    assert {"raw_top1", "raw_top5"} <= losses[4].keys()


def test_the_averages_have_the_same_figures_where_the_weights_themselves_are_not_evaluated(tmp_path: Path) -> None:
    settings = {"statistics_loader": RandomImages(), "num_statistics_batches": 2, "max_steps": 4}
    both, averages = (
        small_trainer(tmp_path / str(raw), evaluate_raw=raw, **settings).train().evaluation["test"]
        for raw in (True, False)
    )
    assert averages and averages == {name: value for name, value in both.items() if not name.startswith("raw_")}
    assert len(both) == 2 * len(averages)
