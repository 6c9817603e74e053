"""The program that trains, as a user starts it or in the tests' own process, and what a run leaves behind."""

import json
import subprocess
from pathlib import Path

import torch
from hydra import compose
from safetensors.torch import load_file

from gpipe.config import to_run
from gpipe.programs.train import launch_training
from tests.support.program_server import TORCHRUN, run_program

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "train.py"
TINY = (
    "trainer.max_steps=3",
    "trainer.batch_size=16",
    "trainer.evaluation.batch_size=100",
    "trainer.evaluation.max_batches=1",
    "trainer.evaluation.statistics_batches=2",
    "trainer.timeline_every_steps=null",
    "pipeline.num_microbatches=4",
    "model.num_filters=8",
    "data.image_size=32",
    "schedule.warm_up_epochs=0",
    "trainer.deterministic=true",
    "launch.num_threads=1",
    "launch.device=cpu",
    "tracking=disabled",
)


def start(
    folder: Path, *arguments: str, torchrun: bool = False, warnings: str = "error"
) -> subprocess.CompletedProcess[str]:
    """Run train.py in a folder, with warnings as errors, and return what came of it."""
    if not torchrun:
        return run_program(TRAIN, *arguments, folder=folder, warn=warnings)
    words = ("--standalone", "--nproc-per-node", "2", str(TRAIN), *arguments)
    return run_program(TORCHRUN, *words, folder=folder)


def train_here(folder: Path, *overrides: str) -> None:
    """Train in this process, in a folder like a user's: all but the start of the program. Needs `composer`."""
    run = folder / "runs" / "train" / "now"
    run.mkdir(parents=True)
    launch_training(to_run(compose("train", overrides=list(overrides))), run, [])


def run_folder(folder: Path, name: str = "*") -> Path:
    """Return the folder of the one run of that name."""
    (found,) = (folder / "runs").glob(f"{name}/*")
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights and averages of a run's last checkpoint, by kind and name."""
    *_, checkpoint = sorted((folder / "checkpoints").glob("step-*"))
    return {
        f"{kind}/{name}": tensor
        for kind in ("weights", "ema")
        for path in checkpoint.glob(f"{kind}-*.safetensors")
        for name, tensor in load_file(path).items()
    }


def metrics(folder: Path) -> list[dict[str, float]]:
    """Return the lines of a run's log that are of steps and evaluations, without what depends on the machine."""
    every = [json.loads(line) for line in (run_folder(folder) / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in every if "epoch" in line]
    timed = {"examples_per_second", "step_seconds", "peak_memory_bytes", "wait_seconds", "bubble"}
    return [{key: value for key, value in line.items() if key not in timed} for line in lines]
