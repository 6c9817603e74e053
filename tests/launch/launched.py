"""Processes that tests start, and what becomes of them."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from gpipe.launch.processes import Place, Processes

ROOT = Path(__file__).parents[2]
PYTHONPATH = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
MANY_SECONDS = 60  # a process that outlives this was not ended


def two(folder: Path, **changes: object) -> Processes:
    """Return two processes, copies of one that has loaded torch."""
    settings = {
        "num_stages": 2, "num_replicas": 1, "num_processes": 2, "num_threads": 1, "device": "cpu",
        "timeout_seconds": 30.0, "folder": folder, "modules": ("gpipe.launch.processes",),
    }  # fmt: skip
    return Processes(**(settings | changes))


def note_place(place: Place, folder: Path, word: str) -> None:
    coordinate = None if place.mesh is None else list(place.mesh.get_coordinate())
    rank = 0 if place.mesh is None else dist.get_rank()
    shared = place.share("rank", f"from {rank}")
    text = f"{word} {coordinate} {place.is_main} {torch.get_num_threads()} {shared}"
    (folder / f"{rank}.txt").write_text(text)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")


def is_pending(pid: int, number: int) -> bool:
    """Return whether a signal waits for a process, where a second one of its kind would be lost in it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def pids(folder: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in folder.glob("process-*")]


def wait_until(holds: object) -> None:
    deadline = time.monotonic() + MANY_SECONDS / 2
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
