"""Training and checkpoints with one process per stage equal those of one process that plays all stages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from gpipe.checkpoint.folder import find_latest
from gpipe.checkpoint.manifest import Manifest
from gpipe.training.tracking import Tracker
from tests.support.process_pool import ProcessPool
from tests.support.program_server import TORCHRUN, run_program
from tests.training.conftest import Undisturbed
from tests.training.small_run import SmallRun, small_run, small_trainer
from tests.training.test_trainer import Replacing, read_log, state_of
from tests.training.train_and_save import train

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("train_and_save.py")


def latest(folder: Path) -> Path:
    """The newest checkpoint of a run."""
    path = find_latest(folder / "checkpoints")
    assert path is not None
    return path


def test_three_processes_go_on_where_one_stopped_and_one_reads_what_they_wrote(
    tmp_path: Path, processes: ProcessPool, whole: Undisturbed
) -> None:
    stopped = small_trainer(tmp_path / "run", (6,), save_every_steps=5)
    schedule = stopped.learning_rate
    stopped.learning_rate = lambda step: 1 / 0 if step == 7 else schedule(step)
    with pytest.raises(ZeroDivisionError):
        stopped.train()
    for result in processes.run(3, train, tmp_path / "run"):
        assert result["resumed"] and result["evaluation"] == whole.summary.evaluation
    # Each stage wrote its own layers.
    assert Manifest.read(latest(tmp_path / "run")).tensors["weights"]["layers.5.bias"].file == "weights-2.safetensors"

    reader = small_run((1, 5), seed=1)
    reader.load(latest(tmp_path / "run"))
    expected = state_of(whole.trainer)
    found = reader.tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def train_interleaved(rank: int, folder: Path) -> dict[str, Any]:
    """Train with two stages a process, and save."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    settings = {"mesh": mesh, "schedule": "interleaved_1f1b", "stages_per_device": 2}
    tracker = Tracker(folder, enabled=rank == 0, mode="disabled")
    trainer = small_trainer(folder, (1, 2, 2, 1), tracker=tracker, **settings)
    summary = trainer.train()
    trainer.pipeline.close()
    return summary.as_dict()


def test_processes_of_two_stages_train_and_save_what_one_stage_does(tmp_path: Path, processes: ProcessPool) -> None:
    one = small_trainer(tmp_path / "one", (6,), schedule="1f1b")
    evaluation = one.train().as_dict()["evaluation"]
    for summary in processes.run(2, train_interleaved, tmp_path / "two"):
        assert summary["evaluation"] == evaluation
    reader = small_run((1, 5), seed=1)
    reader.load(latest(tmp_path / "two"))
    assert one.ema is not None
    expected, found = SmallRun(one.pipeline, one.optimizer, one.ema).tensors(), reader.tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_replicas_write_once(tmp_path: Path, processes: ProcessPool) -> None:
    processes.run(4, train, tmp_path, 2)
    names = {file.name for file in latest(tmp_path).glob("weights-*")}
    assert names == {"weights-0.safetensors", "weights-1.safetensors"}
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir() if entry.name.startswith(".")] == []


def evaluate_replaced(rank: int, folder: Path) -> None:
    """Train with two replicas; the second one gets the evaluation's mini-batch whose images were replaced."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))
    tracker = Tracker(folder, enabled=rank == 0, mode="disabled")
    sets = {"test": Replacing(15, 4, shuffle=False)}
    trainer = small_trainer(folder, (6,), mesh=mesh, tracker=tracker, evaluation_loaders=sets, max_steps=1)
    trainer.train()
    trainer.pipeline.close()


def test_examples_that_any_replica_replaced_in_an_evaluation_are_counted(
    tmp_path: Path, processes: ProcessPool
) -> None:
    processes.run(2, evaluate_replaced, tmp_path)
    assert [line["test/replaced_examples"] for line in read_log(tmp_path) if "test/loss" in line] == [2]


@pytest.mark.reliability
def test_data_that_one_stage_cannot_read_ends_every_process_with_the_cause(tmp_path: Path) -> None:
    done = run_program(TORCHRUN, "--standalone", "--nproc-per-node=2", str(SCRIPT), str(tmp_path))
    assert done.returncode != 0
    assert "rank 0: OSError: photograph-17.png is broken" in done.stderr
