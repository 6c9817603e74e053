"""Replicas that share out the optimizer's state train and save what replicas do that each keep all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gpipe
from gpipe.pipeline.shared.sharded_optimizer import ShardedOptimizer
from gpipe.training.checkpoints import wrap_optimizer
from gpipe.training.optimizers import OPTIMIZERS, build_optimizer, optimizer_state
from gpipe.training.tracking import Tracker
from tests.support.process_pool import ProcessPool
from tests.training.small_run import NUM_LAYERS, small_trainer

Numbers = dict[str, np.ndarray]


class Gated(nn.Module):
    """A linear layer that replica 1 leaves out; the strides of its weight are those of the transposed one."""

    def __init__(self, replica: int) -> None:
        super().__init__()
        self.replica = replica
        self.linear = nn.Linear(6, 6)
        self.linear.weight = nn.Parameter(self.linear.weight.detach().t().contiguous().t())

    def forward(self, x: Tensor) -> Tensor:
        return x if self.replica == 1 else x + self.linear(x)


def make_layers(replica: int) -> nn.Sequential:
    """Return four layers with seven parameters that are trained."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 9), nn.Sequential(nn.Linear(9, 6), nn.Tanh()), Gated(replica), nn.Linear(6, 5))
    layers[1][0].weight.requires_grad_(False)
    return layers


def make_one_parameter(replica: int) -> nn.Sequential:
    """Return two layers with one parameter: other replicas have none to update, nor has the second stage."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh())


def make_pipeline(num_stages: int, make: Callable[[int], nn.Sequential] = make_layers) -> gpipe.Pipeline:
    replica, world = torch.distributed.get_rank() // num_stages, torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world // num_stages, num_stages), mesh_dim_names=("replica", "stage"))
    layers = make(replica)
    partitions = [len(layers) // num_stages] * num_stages
    return gpipe.Pipeline(layers, nn.functional.cross_entropy, partitions, 2, mesh=mesh, timeout_seconds=10)


def train(
    rank: int, num_stages: int, make: Callable[[int], nn.Sequential], name: str, shards: bool
) -> tuple[Numbers, Numbers, int]:
    """Return the weights, the whole state and how many numbers of it this process keeps."""
    pipeline = make_pipeline(num_stages, make)
    optimizer = build_optimizer(name, pipeline.named_parameters(), 0.1, weight_decay=0.01)
    if shards:
        optimizer = ShardedOptimizer(optimizer, pipeline.job)
    generator = torch.Generator().manual_seed(pipeline.job.replica_index)
    for step in range(3):
        inputs, targets = torch.randn(5, 6, generator=generator), torch.randint(5, (5,), generator=generator)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.zero_grad()
        pipeline.train_step((inputs if pipeline.is_first else None, targets if pipeline.is_last else None))
        gradients = [parameter.grad for parameter in pipeline.parameters()]
        optimizer.step()
        assert all(one is two.grad for one, two in zip(gradients, pipeline.parameters(), strict=True))
    state = wrap_optimizer(optimizer).read()
    kept = sum(one.numel() for one in optimizer_state(optimizer).values() if one.ndim)
    weights = {key: one.detach().numpy().copy() for key, one in pipeline.named_parameters()}
    pipeline.close()
    return weights, {key: one.numpy().copy() for key, one in state.items()}, kept


def train_each(
    rank: int, num_stages: int, make: Callable[[int], nn.Sequential]
) -> list[list[tuple[Numbers, Numbers, int]]]:
    """Return, for each optimizer, what `train` does, without shards and with them."""
    return [[train(rank, num_stages, make, name, shards) for shards in (False, True)] for name in OPTIMIZERS]


def train_both(
    processes: ProcessPool, layout: tuple[int, int], make: Callable[[int], nn.Sequential]
) -> Iterator[list[tuple[list[int], int]]]:
    """Compare what each process has with each optimizer.

    Yields by stage the size of the state that each replica keeps, and of all.
    """
    num_replicas, num_stages = layout
    answers = processes.run(num_replicas * num_stages, train_each, num_stages, make)
    for name, outcomes in zip(OPTIMIZERS, zip(*answers, strict=True), strict=True):
        for rank, ((expected, expected_state, _), (weights, state, kept)) in enumerate(outcomes):
            assert list(weights) == list(expected) and list(state) == list(expected_state)
            assert all(np.array_equal(weights[key], expected[key]) for key in weights), (name, rank)
            there = {key: value for key, value in state.items() if rank < num_stages or value.size > 0}
            assert all(np.array_equal(there[key], expected_state[key]) for key in there), (name, rank)
            if rank >= num_stages:  # it does not save
                assert sum(value.size for value in there.values() if value.ndim) == kept, "it holds others' state"
        yield [
            ([shared[2] for _, shared in outcomes[stage::num_stages]], outcomes[stage][0][2])
            for stage in range(num_stages)
        ]


LAYOUTS = [(2, 1), (2, 2), (3, 1), (4, 1), (3, 2)]  # replicas and stages


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_weights_and_the_whole_state_are_those_of_replicas_that_keep_all(
    layout: tuple[int, int], processes: ProcessPool
) -> None:
    for stages in train_both(processes, layout, make_layers):
        for kept, whole in stages:
            assert sum(kept) == whole and max(kept) < whole


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout[0] > 2], ids=str)
def test_a_replica_without_a_parameter_of_its_own_takes_part(layout: tuple[int, int], processes: ProcessPool) -> None:
    for first, *others in train_both(processes, layout, make_one_parameter):
        kept, whole = first
        assert sorted(kept) == [0] * (layout[0] - 1) + [whole] and whole > 0
        assert all(whole == 0 for _, whole in others)


def save(rank: int, folder: Path, shards: bool, num_steps: int) -> None:
    """Train from the folder's checkpoint, if there is one, and save."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    tracker = Tracker(folder, enabled=rank == 0, mode="disabled")
    trainer = small_trainer(folder, [NUM_LAYERS - 2, 2], mesh=mesh, tracker=tracker, max_steps=num_steps)
    if shards:
        trainer = replace(trainer, optimizer=ShardedOptimizer(trainer.optimizer, trainer.pipeline.job))
    assert trainer.resume() == (folder / "checkpoints").exists()
    trainer.train()
    trainer.pipeline.close()


def read_files(folder: Path, step: int) -> dict[str, bytes]:
    (checkpoint,) = (folder / "checkpoints").glob(f"step-*{step}")
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


def test_a_checkpoint_is_the_same_files_and_either_run_reads_it(tmp_path: Path, processes: ProcessPool) -> None:
    for name, order in {"full": (False, False), "shared": (True, True), "first": (True, False)}.items():
        processes.run(4, save, tmp_path / name, order[0], 4)
        first = read_files(tmp_path / name, 4)
        processes.run(4, save, tmp_path / name, order[1], 6)
        if name == "full":
            expected = first, read_files(tmp_path / name, 6)
            assert {"optimizer-0.safetensors", "optimizer-1.safetensors"} <= first.keys()
        found = first, read_files(tmp_path / name, 6)
        for files, others in zip(found, expected, strict=True):
            assert files.keys() == others.keys()
            assert not [file for file in files if file.endswith(".safetensors") and files[file] != others[file]]


def leave(rank: int) -> str:
    """Let replica 1 fail between a step and its update."""
    pipeline = make_pipeline(1)
    optimizer = ShardedOptimizer(build_optimizer("adamw", pipeline.named_parameters(), 0.1), pipeline.job)
    batch: Any = torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64)
    pipeline.train_step(batch)
    if rank == 1:
        pipeline.job.abort(OSError("the disk is gone"))
        return ""
    with pytest.raises(gpipe.PipelineError) as caught:
        optimizer.step()
    return str(caught.value)


def fail_in_the_update(rank: int) -> bool:
    """Let the update itself fail; return whether the gradients are what they were."""
    pipeline = make_pipeline(1)
    optimizer = ShardedOptimizer(build_optimizer("sgd", pipeline.named_parameters(), 0.1), pipeline.job)
    pipeline.train_step((torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64)))
    before = {name: parameter.grad for name, parameter in pipeline.named_parameters()}

    def fail(*_: Any) -> None:
        raise MemoryError

    optimizer.whole.register_step_pre_hook(fail)
    with pytest.raises(MemoryError):
        optimizer.step()
    return all(parameter.grad is before[name] for name, parameter in pipeline.named_parameters())


def test_an_update_that_fails_leaves_all_gradients(processes: ProcessPool) -> None:
    assert processes.run(2, fail_in_the_update) == [True, True]


def test_a_replica_that_fails_before_its_update_is_named(processes: ProcessPool) -> None:
    assert "OSError: the disk is gone" in processes.run(2, leave)[0]
