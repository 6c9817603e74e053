"""What a run stands on changes under it: its folder, the disk of temporary files, the clock, what shows it."""

import ctypes
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpipe.records import read_records
from tests.reliability.session import Session, assert_same, last_step, run_folder, saved_steps

pytestmark = pytest.mark.reliability
_SET_FLAGS, _IMMUTABLE = 0x40086602, 0x10  # of linux/fs.h
LONG = "trainer.num_epochs=100"


class Disk:
    """A small disk of its own, which only root may mount."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._libc = folder, ctypes.CDLL(None, use_errno=True)
        folder.mkdir(parents=True)
        if os.geteuid() != 0 or self._libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=1m") != 0:
            pytest.skip("only root may mount a disk of its own")
        self._rest = os.open(folder / "rest", os.O_CREAT | os.O_RDWR)

    def fill(self) -> None:
        free = os.statvfs(self.folder)
        os.posix_fallocate(self._rest, 0, free.f_bavail * free.f_bsize)
        with pytest.raises(OSError, match="No space left"):
            os.pwrite(self._rest, b"x", (free.f_bavail + 1) * free.f_bsize)

    def remove(self) -> None:
        os.close(self._rest)
        self._libc.umount2(str(self.folder).encode(), 2)


@pytest.fixture
def disk() -> Iterator[Disk]:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # sockets have short names
        disk = Disk(Path(short, "disk"))
        yield disk
        disk.remove()


def is_under_way(run: Path) -> bool:
    return last_step(run) >= 2


@pytest.mark.parametrize("launch", ["one process", "launched"])
def test_a_folder_that_is_removed_is_named_and_does_not_come_back(begin: Callable[..., Session], launch: str) -> None:
    session = begin(launch, LONG)
    session.wait_for(is_under_way)
    run = run_folder(session.folder)
    run.rename(session.folder / "aside")
    shutil.rmtree(session.folder / "aside")
    assert session.status() == 1
    assert "was removed or renamed during the run: start the same command again" in session.said()
    assert not run.exists()


@contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Let nobody, not even root, write into a folder or change its files."""
    paths = [folder, *(path for path in folder.rglob("*") if path.name.partition(".")[2] == "jsonl" or path.is_dir())]
    opened = [os.open(path, os.O_RDONLY) for path in paths]
    try:
        for descriptor in opened:
            try:
                fcntl.ioctl(descriptor, _SET_FLAGS, struct.pack("l", _IMMUTABLE))
            except OSError:
                pytest.skip("only root may freeze a folder, where the file system can")
        yield
    finally:
        for descriptor in opened:
            with suppress(OSError):
                fcntl.ioctl(descriptor, _SET_FLAGS, struct.pack("l", 0))
            os.close(descriptor)


@pytest.mark.parametrize("launch", ["one process", "launched"])
def test_a_folder_that_becomes_read_only_is_named(begin: Callable[..., Session], launch: str) -> None:
    session = begin(launch, LONG)
    session.wait_for(is_under_way)
    with frozen(run := run_folder(session.folder)):
        assert session.status() == 1
    error, *notes = session.said()[session.said().index("error: ") :].splitlines()
    assert error.startswith(f"error: no access to {run.relative_to(session.folder)}/"), error
    assert len(notes) <= 2, notes


def test_a_full_disk_of_temporary_files_stops_no_run_and_no_stop(
    begin: Callable[..., Session], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(disk.folder))
    session = begin("launched", LONG)
    session.wait_for(is_under_way)
    disk.fill()
    before = last_step(run_folder(session.folder))
    session.wait_for(lambda run: last_step(run) >= before + 2)
    session.send(signal.SIGTERM)
    assert session.status() == 75, session.said()
    run = run_folder(session.folder)
    assert saved_steps(run)[-1:] == [last_step(run)]


def test_nothing_of_a_killed_run_stays_among_the_temporary_files_after_the_next_start(
    begin: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # sockets have short names
        monkeypatch.setenv("TMPDIR", short)
        kill_and_start_again(begin, Path(short))


def kill_and_start_again(begin: Callable[..., Session], temporary: Path) -> None:
    session = begin("launched", "data.num_workers=1", "tracking=offline")
    session.wait_for(is_under_way)
    session.send(signal.SIGKILL, to_all=True)
    session.status()
    assert list(temporary.iterdir())
    again = begin("launched", "data.num_workers=1", "tracking=offline", anew=True)  # it ends as Python does, too
    assert again.status() == 0, again.said()
    assert not list(temporary.iterdir())


def test_a_clock_that_goes_back_by_an_hour_changes_nothing(
    whole: Path, begin: Callable[..., Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, is_back = tmp_path / "clock.so", tmp_path / "back"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, Path(__file__).with_name("clock.c")], check=True)
    monkeypatch.setenv("CLOCK_IS_BACK", str(is_back))
    every = "trainer.checkpoints.every_steps=1"
    session = begin("launched", every, preloaded=library)
    session.wait_for(lambda run: last_step(run) >= 3)
    is_back.touch()
    session.wait_for(lambda run: last_step(run) >= 6)
    session.send(signal.SIGTERM)
    assert session.status() == 75, session.said()
    again = begin("launched", every, preloaded=library)
    assert again.status() == 0, again.said()
    run = run_folder(again.folder)
    (record,) = read_records(run)
    began = datetime.strptime(run.name, "%Y-%m-%d_%H-%M-%S").astimezone(UTC)
    assert datetime.fromisoformat(record.date) < began, "the clock did not go back"
    assert_same(run, whole)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_whose_wandb_ends_is_done_and_marked(begin: Callable[..., Session], number: signal.Signals) -> None:
    session = begin("launched", "tracking=offline", "trainer.num_epochs=6")
    session.wait_for(is_under_way)
    (wandb,) = session.children_named("wandb-core")
    os.kill(wandb, number)
    assert session.status() == 0, session.said()
    assert session.said().count("warning: Weights & Biases failed") == 1
    (record,) = read_records(run_folder(session.folder))
    assert record.results["tracking_lost"].startswith("Weights & Biases: ")
