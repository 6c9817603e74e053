"""Whole programs on simulated GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.simulated_cuda.ledger import FAULTS_FILE

ROOT = Path(__file__).parents[2]
_FAULTS = "faults.txt"


def make_environment(folder: Path, **variables: str) -> dict[str, str]:
    """Return the environment in which Python has simulated GPUs; the faults of all processes go to a file there."""
    paths = ROOT / "tests" / "simulated_cuda" / "everywhere", ROOT / "src", ROOT
    own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), FAULTS_FILE: str(folder / _FAULTS), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **variables}


def read_faults(folder: Path) -> list[str]:
    """Return the faults that processes with such an environment have made."""
    path = folder / _FAULTS
    return path.read_text().splitlines() if path.exists() else []


def run_on_gpus(folder: Path, *words: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of Python's with such an environment."""
    command, environment = [sys.executable, *map(str, words)], make_environment(folder, **variables)
    return subprocess.run(command, cwd=cwd, env=environment, check=False, capture_output=True, text=True)
