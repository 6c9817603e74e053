"""Whole programs on simulated GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.simulated_cuda.ledger import FAULTS_FILE
from tests.support.program_server import SIMULATED_GPUS, run_program

ROOT = Path(__file__).parents[2]
_FAULTS = "faults.txt"


def make_variables(folder: Path) -> dict[str, str]:
    """Return the variables of programs on simulated GPUs; the faults of all processes go to a file in a folder."""
    return {FAULTS_FILE: str(folder / _FAULTS), "OMP_NUM_THREADS": "1"}


def read_faults(folder: Path) -> list[str]:
    """Return the faults that processes with such variables have made."""
    path = folder / _FAULTS
    return path.read_text().splitlines() if path.exists() else []


def run_on_gpus(program: Path | str, *arguments: str, folder: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of this repository with such variables; see `run_program`."""
    return run_program(program, *arguments, folder=cwd, gpus=True, **make_variables(folder))


def run_new_python(*words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a new Python with such variables in the root of the repository."""
    paths = SIMULATED_GPUS, ROOT / "src", ROOT
    own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), **make_variables(folder), **variables}
    words, environment = (sys.executable, *words), {**os.environ, **own}
    return subprocess.run(words, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
