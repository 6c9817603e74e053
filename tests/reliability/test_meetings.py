"""Starts that meet: each trains in a folder of its own, or is told whose the folder is."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpipe.config import read_yaml
from gpipe.records import read_records
from tests.reliability.session import LONG_SECONDS, ROOT, TINY
from tests.support.program_server import Program

pytestmark = pytest.mark.reliability


def begin(folder: Path, number: int, *arguments: str) -> Program:
    """Start a training, whose output goes to a file of its number."""
    flags = [word for word in arguments if word.startswith("-")]  # train.py wants them first
    settings = [word for word in arguments if word not in flags]
    output = folder / f"{number}.txt"
    output.touch()
    words = (*flags, *TINY, "trainer.max_steps=1", *settings)
    return Program(ROOT / "train.py", *words, folder=folder, output=output, OMP_NUM_THREADS="1")


def wait(folder: Path, together: Sequence[Program]) -> list[tuple[int, str]]:
    """Return the exit status of each, and what it said."""
    statuses = [program.wait(LONG_SECONDS) for program in together]
    return [(status, (folder / f"{number}.txt").read_text()) for number, status in enumerate(statuses)]


def test_starts_in_the_same_second_leave_the_record_and_the_settings_of_each(tmp_path: Path) -> None:
    ends = wait(tmp_path, [begin(tmp_path, seed, f"seed={seed}") for seed in range(3)])
    assert [status for status, _ in ends] == [0, 0, 0], ends
    records = {path: read_records(path / "record.json")[0] for path in tmp_path.glob("runs/train/*")}
    assert sorted(record.seed for record in records.values()) == [0, 1, 2]
    for path, record in records.items():
        assert read_yaml(path / "config.yaml") == record.config
        assert len(list((path / "checkpoints").glob("step-*"))) == 1
        assert not (path / ".lock").exists()


def test_of_two_starts_in_a_named_folder_one_is_told_whose_it_is(tmp_path: Path) -> None:
    ends = dict(wait(tmp_path, [begin(tmp_path, number, "hydra.run.dir=mine") for number in range(2)]))
    assert ends.keys() == {0, 1}, ends
    assert re.match(r"error: mine is in use by process \d+ on .+: wait until that has ended, or choose", ends[1]), ends
    assert len(read_records(tmp_path / "mine")) == 1


def test_three_sweeps_at_once_do_each_job_once(tmp_path: Path) -> None:
    ends = wait(tmp_path, [begin(tmp_path, number, "-m", "seed=0,1") for number in range(3)])
    assert [status for status, _ in ends] == [0, 0, 0], ends
    records = {path.parent: read_records(path)[0] for path in tmp_path.glob("runs/**/record.json")}
    assert sorted(record.seed for record in records.values()) == [0, 1], ends
    for path, record in records.items():
        assert read_yaml(path / "config.yaml") == record.config
        assert not (path / ".lock").exists()
