"""Temporary files of a run: in one folder, which the next start removes if the run was killed."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gpipe.launch import scratch

START = """
import sys, tempfile
from gpipe.launch.scratch import scratch_folder
print(scratch_folder(), tempfile.mkdtemp(prefix="left-"), flush=True)
sys.stdin.read()
"""


def start(folder: Path) -> tuple[subprocess.Popen[str], Path, Path]:
    """Start a process; return it, its folder, and a temporary folder that it has made."""
    environment = os.environ | {"TMPDIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    own, made = map(Path, process.stdout.readline().split())
    return process, own, made


def end(process: subprocess.Popen[str]) -> None:
    with process:  # closes its input
        pass


def test_a_start_removes_what_killed_processes_left_and_nothing_else(tmp_path: Path) -> None:
    (other := tmp_path / "gpipe-of-somebody").mkdir()
    killed, left, made = start(tmp_path)
    living, kept, _ = start(tmp_path)
    assert made.parent == left != kept
    with killed:
        killed.kill()
    assert made.exists()
    third, own, _ = start(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([other, kept, own])
    end(living)
    end(third)
    assert list(tmp_path.iterdir()) == [other]


def test_a_folder_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "gpipe-left").mkdir()
    (folder / ".lock").touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
        scratch._remove_dead(tmp_path)
        assert folder.exists()
    scratch._remove_dead(tmp_path)
    assert not folder.exists()


def test_a_folder_that_another_process_takes_for_a_dead_ones_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, lock = [], scratch._lock
    monkeypatch.setenv("TMPDIR", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_lock", lambda folder: tried.append(folder) if not tried else lock(folder))
    own = scratch.scratch_folder.__wrapped__()
    assert [own] != tried and own.parent == tmp_path and (own / ".lock").exists()


def test_processes_that_it_starts_use_the_folder_too(tmp_path: Path) -> None:
    code = START.replace("sys.stdin.read()", "import os; os.execv(sys.executable, [sys.executable, '-c', CHILD])")
    code = f"CHILD = 'import tempfile; print(tempfile.gettempdir())'\n{code}"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    own, child = found.stdout.splitlines()
    assert own.split()[0] == child
    assert Path(child).parent == tmp_path != Path(tempfile.gettempdir())
