"""Starts that meet: each trains in a folder of its own, or is told whose the folder is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe.config import read_yaml
from gpipe.records import read_records
from tests.reliability.session import ROOT, TINY

pytestmark = pytest.mark.reliability


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    flags = [word for word in arguments if word.startswith("-")]  # train.py wants them first
    settings = [word for word in arguments if word not in flags]
    command = [sys.executable, str(ROOT / "train.py"), *flags, *TINY, "trainer.max_steps=1", *settings]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_starts_in_the_same_second_leave_the_record_and_the_settings_of_each(tmp_path: Path) -> None:
    together = [begin(tmp_path, f"seed={seed}") for seed in range(3)]
    ends = [process.communicate(timeout=120) for process in together]
    assert [process.returncode for process in together] == [0, 0, 0], ends
    records = {path: read_records(path / "record.json")[0] for path in tmp_path.glob("runs/train/*")}
    assert sorted(record.seed for record in records.values()) == [0, 1, 2]
    for path, record in records.items():
        assert read_yaml(path / "config.yaml") == record.config
        assert len(list((path / "checkpoints").glob("step-*"))) == 1
        assert not (path / ".lock").exists()


def test_of_two_starts_in_a_named_folder_one_is_told_whose_it_is(tmp_path: Path) -> None:
    together = [begin(tmp_path, "hydra.run.dir=mine") for _ in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in together]
    ends = {process.returncode: error for process, error in zip(together, errors, strict=True)}
    assert ends.keys() == {0, 1}, errors
    assert re.match(r"error: mine is in use by process \d+ on .+: wait until that has ended, or choose", ends[1])
    assert len(read_records(tmp_path / "mine")) == 1


def test_three_sweeps_at_once_do_each_job_once(tmp_path: Path) -> None:
    together = [begin(tmp_path, "-m", "seed=0,1") for _ in range(3)]
    ends = [process.communicate(timeout=240) for process in together]
    assert [process.returncode for process in together] == [0, 0, 0], ends
    records = {path.parent: read_records(path)[0] for path in tmp_path.glob("runs/**/record.json")}
    assert sorted(record.seed for record in records.values()) == [0, 1], ends
    for path, record in records.items():
        assert read_yaml(path / "config.yaml") == record.config
        assert not (path / ".lock").exists()
