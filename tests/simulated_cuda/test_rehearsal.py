"""`make gpu`, rehearsed to the end with tiny models on simulated GPUs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from experiments.gpu.progress import END_FILE, LOG_FILE
from experiments.gpu.steps import TORCHGPIPE, list_steps
from gpipe.records import read_records
from reproductions import FOLDER, RUNS_FILE
from tests.simulated_cuda.environment import ROOT, make_variables, read_faults, run_on_gpus
from tests.support.program_server import MAKE_GPU, Program

STEPS = list_steps(small=True)
IN_THE_PLACE_OF_TORCHGPIPE = """
from torch import nn
def amoebanetd(num_classes, num_layers, num_filters):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes))
"""


def make_repository(folder: Path) -> Path:
    """Make a repository that can be cloned instead of torchgpipe's."""
    models = folder / "benchmarks" / "models"
    models.mkdir(parents=True)
    (models / "amoebanet.py").write_text(IN_THE_PLACE_OF_TORCHGPIPE)
    git = "git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@x", "-c", "init.defaultBranch=main"
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"], ["tag", TORCHGPIPE[1]]):
        subprocess.run([*git, *words], check=True)
    return folder


def copy_pages(folder: Path) -> Path:
    """Copy what `python -m reproductions` renders and reads."""
    for name in ("docs", FOLDER):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "README.md", folder)
    return folder


def count_records(pages: Path) -> dict[str, int]:
    return {path.parent.name: len(read_records(path)) for path in pages.glob(f"{FOLDER}/*/{RUNS_FILE}")}


@pytest.mark.reliability
@pytest.mark.timeout(900)  # a minute and a half of computing, beside other tests
def test_all_steps_run_to_the_end_and_what_is_killed_goes_on(tmp_path: Path) -> None:
    pages, folder = copy_pages(tmp_path / "pages"), tmp_path / "steps"
    before = count_records(pages)
    places = {"--folder": folder, "--pages": pages, "--torchgpipe": make_repository(tmp_path / "torchgpipe")}
    options = "--small", *(word for name, place in places.items() for word in (name, str(place)))
    output = tmp_path / "killed.txt"
    output.touch()
    killed = Program(MAKE_GPU, *options, folder=ROOT, output=output, gpus=True, **make_variables(tmp_path))
    _wait_for(folder / STEPS[1].name / LOG_FILE)
    os.kill(killed.pid, signal.SIGTERM)
    assert killed.wait(60) == 128 + signal.SIGTERM
    assert _read_end(folder, 0)["failure"] is None and not (folder / STEPS[1].name / END_FILE).exists()

    done = run_on_gpus(MAKE_GPU, *options, folder=tmp_path, cwd=ROOT)
    logs = [(folder / step.name / LOG_FILE).read_text() for step in STEPS]
    assert done.returncode == 0, "\n".join([done.stdout, *logs])
    assert done.stdout.startswith(f"{STEPS[0].name}: done before\n{STEPS[1].name}: at most")
    assert done.stdout.endswith(f"{len(STEPS)} of {len(STEPS)} steps are done, and their records are on the pages.\n")
    assert read_faults(tmp_path) == []
    after = count_records(pages)
    added = {claim: after[claim] - before[claim] for claim in before if after[claim] > before[claim]}
    assert added == {
        "table1_model_size": 1, "table2_throughput": 3, "table3_slow_links": 2, "bubble": 3,
        "table4_imagenet_and_transfer": 1,
    }  # fmt: skip
    page = (pages / FOLDER / "table4_imagenet_and_transfer" / "README.md").read_text()
    assert "| torchgpipe | 4 |" in page
    page = (pages / FOLDER / "bubble" / "README.md").read_text()
    assert "| Transformer-2 | 2 | 2 | 33.3% |" in page and "| AmoebaNet-D (3,8), 32 px | 4 | 2 |" in page

    again = run_on_gpus(MAKE_GPU, *options, folder=tmp_path, cwd=ROOT)
    assert again.returncode == 0 and again.stdout.count("done before") == len(STEPS)
    assert count_records(pages) == after


def _read_end(folder: Path, number: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / STEPS[number].name / END_FILE).read_text())
    return found


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.05)
