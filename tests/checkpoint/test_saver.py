"""Saving while training goes on: later steps change nothing, and nothing half-written is taken for a checkpoint."""

import re
import resource
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from gpipe.checkpoint.content import Content
from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.folder import find_latest
from gpipe.checkpoint.format import FileImage
from gpipe.checkpoint.manifest import MANIFEST
from gpipe.checkpoint.saver import Saver
from gpipe.checkpoint.writer import Snapshot, Writer
from tests.checkpoint.conftest import POSITION
from tests.support.process_pool import ProcessPool
from tests.training.small_run import SmallRun, assert_equal, small_run


def begin(saver: Saver, run: SmallRun, step: int = 3, **settings: Any) -> Path:
    """Begin to save everything that a run has."""
    position = replace(POSITION, step=step)
    return saver.save(run.content(position), **settings)


class Gate:
    """Lets files be written when it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        self.hangs = False
        write = FileImage.write

        def waiting_write(image: FileImage, path: Path, go_on: Callable[[], bool] = lambda: True) -> Any:
            self.reached.set()
            while not self.open.wait(0.01):
                if not self.hangs and not go_on():
                    raise CheckpointError("no longer needed")
            return write(image, path, go_on)

        patch.setattr(FileImage, "write", waiting_write)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A disk that writes nothing until it is told to."""
    return Gate(monkeypatch)


def test_names_follow_the_layer_and_each_stage_has_its_files(checkpoint: Path, trained: SmallRun) -> None:
    # Stage 1 has a layer with dropout and one that flattens: no tensors, no files.
    expected = {f"{kind}-{stage}.safetensors" for kind in ("weights", "ema", "optimizer") for stage in (0, 2)}
    assert {path.name for path in checkpoint.iterdir()} == expected | {MANIFEST}
    assert set(load_file(checkpoint / "weights-0.safetensors")) == {
        name for name in trained.pipeline.layers.state_dict(prefix="layers.") if name.startswith("layers.0.")
    }
    slots = {name.rsplit("/", 1)[1] for name in load_file(checkpoint / "optimizer-2.safetensors")}
    assert slots >= {"square_avg", "momentum_buffer"}


@pytest.mark.parametrize("optimizer", ["rmsprop", "adamw"])
def test_training_that_goes_on_does_not_change_what_is_written(tmp_path: Path, gate: Gate, optimizer: str) -> None:
    run, undisturbed = small_run((1, 2, 3), optimizer=optimizer), small_run(optimizer=optimizer)
    run.train(2)
    then = run.tensors()
    saver = Saver(tmp_path, run.pipeline)
    path = begin(saver, run)
    run.train(3, saver.wait_until_copied)
    assert gate.reached.wait(60)
    saver.check([saver.status()])
    assert saver.status() is not None and not path.exists() and find_latest(tmp_path) is None
    gate.open.set()
    saver.wait()
    reader = small_run((2, 4), seed=1, optimizer=optimizer)
    reader.load(path)
    assert_equal(reader, then)
    undisturbed.train(2)
    undisturbed.train(3)
    assert_equal(run, undisturbed.tensors())


def test_a_late_copy_has_no_statistics_of_a_later_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, is_late, copy = small_run((1, 2, 3)), threading.Event(), Snapshot.copy

    def late_copy(snapshot: Snapshot) -> None:
        assert is_late.wait(60)
        copy(snapshot)

    def before_update() -> None:
        is_late.set()
        saver.wait_until_copied()

    monkeypatch.setattr(Snapshot, "copy", late_copy)
    run.train(2)
    then, saver = run.tensors(), Saver(tmp_path, run.pipeline)
    path = begin(saver, run)
    run.train(1, before_update)
    saver.wait()
    reader = small_run(seed=1)
    reader.load(path)
    assert_equal(reader, then)
    assert any(not torch.equal(then[name], now) for name, now in run.tensors().items() if "running_mean" in name)


def test_a_save_waits_for_the_previous_one(tmp_path: Path, gate: Gate) -> None:
    run = small_run()
    run.train(1)
    first, saver = run.tensors(), Saver(tmp_path, run.pipeline)
    path = begin(saver, run, 1)
    run.train(1, saver.wait_until_copied)
    threading.Timer(0.2, gate.open.set).start()
    begin(saver, run, 2)
    assert path.exists()
    saver.wait()
    for step, expected in ((1, first), (2, run.tensors())):
        reader = small_run(seed=1)
        reader.load(tmp_path / f"step-0000000{step}")
        assert_equal(reader, expected)


def test_a_state_that_grew_is_saved_completely(tmp_path: Path) -> None:
    run = small_run()
    saver = Saver(tmp_path, run.pipeline)
    begin(saver, run, 0)  # the optimiser has no state yet
    run.train(1)
    path = begin(saver, run, 1)
    saver.wait()
    reader = small_run(seed=1)
    reader.load(path)
    assert_equal(reader, run.tensors())


def test_a_state_that_shrank_leaves_nothing_in_the_next_checkpoint(tmp_path: Path) -> None:
    snapshot = Snapshot([1])
    for weight, state in ((torch.zeros(2), {"layers.0.weight/step": torch.zeros(())}), (torch.ones(1).double(), {})):
        snapshot.take({"weights": {"layers.0.weight": weight}, "optimizer": state})
        snapshot.copy()
    assert list(snapshot.write(tmp_path, lambda: True)) == ["weights-0.safetensors"]
    found = load_file(tmp_path / "weights-0.safetensors")["layers.0.weight"]
    assert found.dtype == torch.float64 and found.tolist() == [1.0]


def test_tensors_of_any_width_and_order_can_be_saved(tmp_path: Path) -> None:
    tensors = {"layers.0.a": torch.ones(3, dtype=torch.uint8), "layers.0.b": torch.full((2,), 0.5).double()}
    snapshot = Snapshot([1])
    snapshot.take({"weights": tensors})
    snapshot.copy()
    snapshot.write(tmp_path, lambda: True)
    found = load_file(tmp_path / "weights-0.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_an_interrupted_save_is_never_taken_for_a_checkpoint(
    tmp_path: Path, trained: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trained.save(tmp_path, POSITION)
    with monkeypatch.context() as patch:
        patch.setattr("gpipe.checkpoint.saver.write_manifest", lambda *arguments: 1 / 0)
        with pytest.raises(CheckpointError, match=r"cannot be written or read \(ZeroDivisionError"):
            trained.save(tmp_path, replace(POSITION, step=4))
    assert find_latest(tmp_path) == first
    second = trained.save(tmp_path, replace(POSITION, step=4))
    assert find_latest(tmp_path) == second
    small_run(seed=1).load(second)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, trained: SmallRun) -> None:
    (tmp_path / "checkpoints").write_text("a file in its place", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"cannot be written or read .*checkpoints.*check the disk"):
        trained.save(tmp_path / "checkpoints", POSITION)


def test_a_folder_that_another_run_has_made_since_gets_no_checkpoint(tmp_path: Path) -> None:
    run, folder = small_run(), tmp_path / "checkpoints"
    saver = Saver(folder, run.pipeline)
    path = begin(saver, run, 3)
    saver.wait()
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    with pytest.raises(CheckpointError, match="checkpoints was removed or renamed during the run"):
        begin(saver, run, 4)
    assert list(folder.iterdir()) == [] and (tmp_path / "moved" / path.name).exists()


def test_a_failed_write_is_raised_at_the_next_boundary_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run((1, 2, 3))
    good = run.save(tmp_path, POSITION)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileImage, "write", full)
    saver = Saver(tmp_path, run.pipeline)
    begin(saver, run, 4)
    with pytest.raises(CheckpointError, match=r"No space left on device\): check the disk"):
        saver.wait()
    assert {path.name for path in tmp_path.iterdir()} == {"latest", good.name}
    saver.check([saver.status()])  # said once
    monkeypatch.undo()
    begin(saver, run, 4)
    saver.wait()
    assert find_latest(tmp_path) == tmp_path / "step-00000004"


def test_an_abandoned_save_changes_nothing(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpipe.checkpoint.saver._GRACE_SECONDS", 0.1)
    run = small_run()
    saver = Saver(tmp_path, run.pipeline)
    path = begin(saver, run)
    writer = saver._writer
    saver.abandon()
    assert not path.exists() and find_latest(tmp_path) is None
    assert writer is not None
    writer.wait(60)
    assert writer.status()["is_done"], "it stops though the disk has not answered"
    gate.open.set()
    rehearse(run, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_leader_that_gives_up_waits_for_no_other_process(tmp_path: Path) -> None:
    run = small_run()
    writer = Writer(Snapshot(run.pipeline.partitions), tmp_path, run.pipeline, lambda files: None, num_processes=2)
    writer.give_up(60)
    status = writer.status()
    assert status["is_done"] and "is no longer needed" in status["error"]["text"]


def test_a_disk_that_does_not_answer_is_an_error(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpipe.checkpoint.saver._GRACE_SECONDS", 0.1)
    run = small_run()
    run.pipeline.timeout_seconds, run.pipeline.step = 0.3, 4
    saver = Saver(tmp_path, run.pipeline)
    gate.hangs = True
    begin(saver, run)
    assert gate.reached.wait(60)
    assert run.pipeline.job.place == "between two steps, while saving after step 4"
    with pytest.raises(CheckpointError, match=r"the disk has not answered for \d+ s\): check the disk"):
        saver.wait()
    gate.open.set()
    assert find_latest(tmp_path) is None


def test_a_save_that_ended_long_ago_is_not_taken_for_a_disk_that_does_not_answer(tmp_path: Path) -> None:
    run = small_run()
    saver = Saver(tmp_path, run.pipeline)
    path = begin(saver, run)
    assert saver._writer is not None
    saver._writer.wait(60)
    run.pipeline.timeout_seconds = 0.0  # as if the step since had taken longer
    saver.check([saver.status()])
    assert saver.status() is None and find_latest(tmp_path) == path


def test_a_copy_that_fails_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Snapshot) -> None:
        raise MemoryError("no room for copies")

    monkeypatch.setattr(Snapshot, "copy", fail)
    run = small_run()
    run.pipeline.timeout_seconds = 10
    saver = Saver(tmp_path, run.pipeline)
    begin(saver, run)
    saver.wait_until_copied()
    with pytest.raises(CheckpointError, match=r"MemoryError: no room for copies"):
        saver.wait()


def test_tensors_that_share_memory_are_saved_under_each_name(tmp_path: Path) -> None:
    run = small_run()
    run.pipeline.layers["5"].tied = run.pipeline.layers["5"].weight
    path = run.save(tmp_path, POSITION, with_ema=False)
    reader = small_run(seed=1)
    reader.pipeline.layers["5"].tied = torch.nn.Parameter(torch.zeros(6, 8))
    reader.load_weights_alone(path)
    assert torch.equal(reader.pipeline.layers["5"].tied, run.pipeline.layers["5"].weight)


def save_with_a_fault(rank: int, folder: Path, faulty: int) -> str:
    """Save with three processes, one of which cannot write; return the error that each sees."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("stage",))
    run = small_run((1, 2, 3), order={"mesh": mesh})
    run.train(1)
    saver = Saver(folder, run.pipeline)
    begin(saver, run, 1)
    saver.wait()
    with pytest.MonkeyPatch.context() as patch:
        if rank == faulty:
            patch.setattr(
                "gpipe.checkpoint.writer.write_flushed",
                lambda path, text: (_ for _ in ()).throw(OSError(28, path.name)),
            )
        begin(saver, run, 2)
        try:
            for _ in range(10_000):
                saver.check(run.pipeline.job.gather(saver.status()))
        except CheckpointError as error:
            found = str(error)
    begin(saver, run, 3)
    saver.wait()
    run.pipeline.close()
    return found


@pytest.mark.parametrize("faulty", [0, 2])
def test_an_error_of_one_process_is_raised_on_all(tmp_path: Path, processes: ProcessPool, faulty: int) -> None:
    errors = processes.run(3, save_with_a_fault, tmp_path, faulty)
    assert len(set(errors)) == 1 and f"part-{faulty}.json" in errors[0]
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step-00000001", "step-00000003"}


def rehearse(run: SmallRun, folder: Path, **settings: Any) -> None:
    """Rehearse a save of everything that a run has."""
    Saver(folder, run.pipeline).rehearse(run.content(POSITION, **settings))


def test_a_rehearsal_changes_nothing(tmp_path: Path) -> None:
    run = small_run((1, 2, 3))
    rehearse(run, tmp_path)
    assert list(tmp_path.iterdir()) == []
    path = run.save(tmp_path, POSITION, config={"seed": 0})
    rehearse(run, tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"latest", path.name}
    run.load(path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"max_hours": float("inf")}, "step 3 cannot be saved (Out of range float values"),
        ({"folder": Path()}, "step 3 cannot be saved (Object of type"),
    ],
)
def test_settings_that_cannot_be_saved_fail_in_the_rehearsal(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)):
        rehearse(small_run(), tmp_path, config=config)
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_that_could_not_be_read_again_fails_in_the_rehearsal(tmp_path: Path) -> None:
    saver = Saver(tmp_path, small_run().pipeline)
    with pytest.raises(CheckpointError, match=r"read again: position\.seed is 9223372036854775808"):
        saver.rehearse(Content(replace(POSITION, seed=2**63), {"weights": {}}))


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (
            torch.empty(2**60, device="meta"),
            r"has room for [\d,]+ bytes, but a checkpoint has more than 4,611,686,018,42",
        ),
        (torch.empty(3, dtype=torch.complex64), "layers.0.weight has the dtype complex64, expected one of float64"),
    ],
)
def test_tensors_that_cannot_be_saved_fail_in_the_rehearsal(tmp_path: Path, tensor: torch.Tensor, said: str) -> None:
    saver = Saver(tmp_path, small_run().pipeline)
    with pytest.raises(CheckpointError, match=said):
        saver.rehearse(Content(POSITION, {"weights": {"layers.0.weight": tensor}}))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_does_not_tell_its_size_passes_the_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0, free=0))
    rehearse(small_run(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_no_bytes_fails_in_the_rehearsal(tmp_path: Path) -> None:
    saver, limits = Saver(tmp_path, small_run().pipeline), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            saver.rehearse(Content(POSITION, {"weights": {}}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def rehearse_apart(rank: int, folder: Path, faulty: int) -> str:
    """Rehearse with three processes, of which one sees another folder; return the error that each sees."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("stage",))
    run = small_run((1, 2, 3), order={"mesh": mesh})
    try:
        rehearse(run, folder / "elsewhere" if rank == faulty else folder)
        return ""
    except CheckpointError as error:
        return str(error)
    finally:
        run.pipeline.close()


def test_a_folder_that_a_process_does_not_see_fails_in_the_rehearsal(tmp_path: Path, processes: ProcessPool) -> None:
    assert processes.run(3, rehearse_apart, tmp_path, -1) == ["", "", ""]
    errors = processes.run(3, rehearse_apart, tmp_path, 2)
    assert len(set(errors)) == 1 and "rank 2, stage 2" in errors[0] and "elsewhere" in errors[0]
    assert list(tmp_path.iterdir()) == []
