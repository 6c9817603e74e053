"""What any number of stages wrote, in any launch, any other reads: bit for bit, and training goes on as one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from gpipe.checkpoint.manifest import Position
from tests.support.process_pool import ProcessPool
from tests.training.small_run import SmallRun, small_run

pytestmark = pytest.mark.reliability

PARTITIONS = {1: (6,), 2: (2, 4), 3: (1, 2, 3), 4: (1, 1, 3, 1)}
POSITION = Position(2, 0, 2, 0)


def in_process(rank: int, num_stages: int, num_replicas: int, seed: int = 0) -> SmallRun:
    mesh = init_device_mesh("cpu", (num_replicas, num_stages), mesh_dim_names=("replica", "stage"))
    return small_run(PARTITIONS[num_stages], seed=seed, order={"mesh": mesh})


def save_in_processes(rank: int, folder: Path, num_stages: int, num_replicas: int) -> None:
    run = in_process(rank, num_stages, num_replicas)
    if num_replicas == 1:
        run.train(2)
    run.save(folder, POSITION)
    run.pipeline.close()


def load_in_processes(rank: int, paths: list[Path], num_stages: int, num_replicas: int) -> list[dict[str, Tensor]]:
    run = in_process(rank, num_stages, num_replicas, seed=1)
    found = []
    for path in paths:
        run.load(path)
        found.append(run.tensors())
    run.pipeline.close()
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    """The state after two steps with one stage."""
    run = small_run()
    run.train(2)
    return run.tensors()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, processes: ProcessPool) -> list[Path]:
    """The same state, saved with each number of stages by one process, and by one process per stage."""
    folder, paths = tmp_path_factory.mktemp("saved"), []
    for num_stages, partitions in PARTITIONS.items():
        run = small_run(partitions)
        run.train(2)
        paths.append(run.save(folder / f"one-{num_stages}", POSITION))
        processes.run(num_stages, save_in_processes, folder / f"each-{num_stages}", num_stages, 1)
        paths.append(folder / f"each-{num_stages}" / paths[-1].name)
    return paths


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("num_stages", PARTITIONS)
def test_one_process_reads_them_all(saved: list[Path], expected: dict[str, Tensor], num_stages: int) -> None:
    run = small_run(PARTITIONS[num_stages], seed=1)
    for path in saved:
        run.load(path)
        assert run.tensors().keys() == expected.keys()
        assert_same(run.tensors(), expected)


@pytest.mark.parametrize(("num_stages", "num_replicas"), [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2)])
def test_a_process_a_stage_reads_them_all(
    saved: list[Path], expected: dict[str, Tensor], processes: ProcessPool, num_stages: int, num_replicas: int
) -> None:
    parts = processes.run(num_stages * num_replicas, load_in_processes, saved, num_stages, num_replicas)
    for number in range(len(saved)):
        assert {name for part in parts for name in part[number]} == expected.keys()
        for part in parts:
            assert_same(part[number], expected)


def test_replicas_save_what_one_pipeline_does(tmp_path: Path, processes: ProcessPool) -> None:
    processes.run(4, save_in_processes, tmp_path / "two", 2, 2)
    alone = small_run((2, 4)).save(tmp_path / "one", POSITION)
    for file in alone.iterdir():
        assert file.read_bytes() == (tmp_path / "two" / alone.name / file.name).read_bytes(), file.name
    assert len(list((tmp_path / "two" / alone.name).iterdir())) == len(list(alone.iterdir()))
