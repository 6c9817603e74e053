"""Checkpoints of a model with tied parameters load with any number of stages, and their copies stay equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.manifest import Position
from gpipe.pipeline.engine import Pipeline
from gpipe.training.ema import Ema
from gpipe.training.optimizers import build_optimizer
from tests.support.process_pool import ProcessPool
from tests.support.tied_model import TABLE, loss, mini_batch, tied_layers
from tests.training.small_run import SmallRun

POSITION = Position(step=2, epoch=0, batch=2, seed=3)


def build(
    partitions: Sequence[int] = (6,), seed: int = 3, mesh: Any = None, optimizer: str = "adamw", tied: bool = True
) -> SmallRun:
    layers = tied_layers("meta", dropout=0.2)
    if not tied:
        layers[5] = nn.Linear(6, 9, device="meta").double()
    pipeline = Pipeline(layers, loss, partitions, 3, mesh=mesh, seed=seed, timeout_seconds=10)
    built = build_optimizer(optimizer, pipeline.named_parameters(), 0.02, weight_decay=1e-2)
    return SmallRun(pipeline, built, Ema(pipeline.layers, 0.9))


def train(run: SmallRun, steps: Sequence[int]) -> None:
    for step in steps:
        run.optimizer.zero_grad()
        run.pipeline.train_step(mini_batch(step))
        run.pipeline.clip_gradients(0.5)
        run.optimizer.step()
        run.ema.update(run.pipeline.step)


def save(folder: Path, run: SmallRun) -> Path:
    return run.save(folder, POSITION)


def resume(path: Path, run: SmallRun) -> None:
    run.load(path)
    run.pipeline.step = POSITION.step


def resume_in_processes(rank: int, path: Path) -> dict[str, Tensor]:
    run = build((2, 2, 2), seed=7, mesh=init_device_mesh("cpu", (3,), mesh_dim_names=("stage",)))
    run.pipeline.seed = 3  # of the masks: other initial weights, so that all must have been loaded
    for stage in run.pipeline.stages.values():
        stage.seed = 3
    resume(path, run)
    train(run, (2, 3))
    save(path.parent / "later", run)
    run.pipeline.close()
    return run.tensors()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "rmsprop"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, optimizer: str) -> None:
    whole, first = build(optimizer=optimizer), build((1, 2, 3), optimizer=optimizer)
    train(whole, (0, 1, 2, 3))
    train(first, (0, 1))
    second = build((3, 3), optimizer=optimizer)
    resume(save(tmp_path, first), second)
    train(second, (2, 3))
    assert second.tensors().keys() == whole.tensors().keys()
    assert_same(second.tensors(), whole.tensors())
    for kind in ("weights", "ema"):
        values = [whole.tensors()[f"{kind}: {name}"] for name in TABLE]
        assert all(torch.equal(value, values[0]) for value in values)


def test_three_processes_resume_what_one_saved_and_one_reads_it_again(tmp_path: Path, processes: ProcessPool) -> None:
    whole, first = build(), build()
    train(whole, (0, 1, 2, 3))
    train(first, (0, 1))
    found = processes.run(3, resume_in_processes, save(tmp_path, first))
    assert {name for part in found for name in part} == whole.tensors().keys()
    for part in found:
        assert_same(part, whole.tensors())
    reader = build((3, 3), seed=8)
    resume(tmp_path / "later" / "step-00000002", reader)
    assert_same(reader.tensors(), whole.tensors())


def test_a_checkpoint_of_an_untied_model_is_refused(tmp_path: Path) -> None:
    untied = build(tied=False)
    train(untied, (0, 1))
    path = save(tmp_path, untied)
    run = build((3, 3))
    before = run.tensors()
    message = r"different values for layers\.0\.weight and layers\.5\.weight in its {}, which are one parameter"
    with pytest.raises(CheckpointError, match=message.format("weights")):
        resume(path, run)
    with pytest.raises(CheckpointError, match=message.format("ema")):
        run.begin(path)
    assert_same(run.tensors(), before)


def test_a_tied_parameter_is_replaced_under_all_its_names_or_none(tmp_path: Path) -> None:
    first, second = build(), build(seed=7)
    train(first, (0, 1))
    path = save(tmp_path, first)
    message = r"^layers\.0\.weight and layers\.5\.weight are one parameter of this model, but only the second"
    with pytest.raises(CheckpointError, match=message):
        second.begin(path, replaced={"layers.5.weight", "layers.5.bias"})
    drawn = second.tensors()["weights: layers.0.weight"]
    second.begin(path, replaced=TABLE)
    found, expected = second.tensors(), first.tensors()
    assert all(torch.equal(found[f"weights: {name}"], drawn) for name in TABLE)
    assert torch.equal(found["weights: layers.5.bias"], expected["ema: layers.5.bias"])
