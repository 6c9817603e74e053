"""Train undisturbed, and once more in a process that is killed at random moments before it may end.

    kill_at_random.py FOLDER KILLS SEED

Each session is a fork of this process, which has imported everything and has described the layers for planning: so a
session is short, and most moments are of its training. It is killed, by SIGKILL, within a fifth of the undisturbed
training's time. Prints how many sessions were killed, and how many ended before they were.
"""

import importlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from hydra import compose, initialize_config_dir

from gpipe.config import RunConfig, register_schemas, to_run
from gpipe.data import check_data
from gpipe.planning.accelerator import detect_accelerator
from gpipe.programs.layout import build_planner, build_setting
from gpipe.programs.resume import resume_folder
from gpipe.programs.train import LOADED_ONCE, launch_training
from tests.reliability.session import ROOT, TINY

SETTINGS = (  # fifteen steps of small batches, a checkpoint after each
    "data.max_images=640",
    "trainer.batch_size=128",
    "trainer.num_epochs=3",
    "trainer.checkpoints.every_steps=1",
    "trainer.evaluation.batch_size=128",
)


def main(folder: Path, num_kills: int, seed: int) -> None:
    run = load()
    began = time.monotonic()
    assert not train(run, folder / "whole" / "runs" / "train" / "session", None)
    seconds = (time.monotonic() - began) / 5

    sessions = [folder / "killed" / "runs" / "train" / f"session-{number:03}" for number in range(num_kills + 1)]
    draw = random.Random(seed)
    killed = [train(run, session, draw.uniform(0, seconds)) for session in sessions[:-1]]
    assert not train(run, sessions[-1], None)
    print(json.dumps({"killed": sum(killed), "ended": killed.count(False)}))


def load() -> RunConfig:
    """Do what every session would: compose the settings, import, describe the layers."""
    register_schemas()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run = to_run(compose("train", overrides=[*TINY, *SETTINGS]))
    check_data(run.data.name, run.data.root)
    for name in (*LOADED_ONCE, "sklearn.datasets"):
        importlib.import_module(name)
    accelerator = detect_accelerator("cpu")
    build_planner(run, accelerator).plan(build_setting(run, accelerator))
    return run


def train(run: RunConfig, folder: Path, kill_after: float | None) -> bool:
    """Train in a fork, in seconds killed unless None; return whether that came before its end."""
    child = os.fork()
    if child == 0:
        with resume_folder(run, folder) as at:
            launch_training(run, at, [], hints=False)
        sys.stdout.flush()
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0, status
    return os.WIFSIGNALED(status)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
