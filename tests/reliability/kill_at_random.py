"""Train undisturbed, and once more in a process that is killed at random moments before it may end.

    kill_at_random.py FOLDER KILLS SEED

Each session is a fork of this process, which has imported everything and has described the layers for planning: so a
session is short, and most moments are of its training. It is killed, by SIGKILL, at a moment within the time of the
undisturbed training's first steps; earlier where it gets far, so that steps are left for every later session. Prints
how many sessions were killed, and how many ended before they were.
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

SETTINGS = (  # thirty steps of small batches, a checkpoint after each
    "data.max_images=160",
    "trainer.num_epochs=3",
    "trainer.checkpoints.every_steps=1",
)
FIRST_STEPS = 4  # a session is killed within their time
POLL_SECONDS = 0.002


def main(folder: Path, num_kills: int, seed: int) -> None:
    run = load()
    whole = folder / "whole"
    began = time.monotonic()
    training = start(run, whole / "runs" / "train" / "session")
    while last_saved(whole) < FIRST_STEPS:
        assert os.waitid(os.P_PID, training, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None, "it ended"
        time.sleep(POLL_SECONDS)
    seconds = time.monotonic() - began
    assert not wait(training)

    draw = random.Random(seed)
    disturbed = folder / "killed"
    killed = []
    for number in range(num_kills):
        training = start(run, disturbed / "runs" / "train" / f"session-{number:03}")
        until = time.monotonic() + draw.uniform(0, seconds)
        while time.monotonic() < until and last_saved(disturbed) <= number:
            time.sleep(POLL_SECONDS)
        os.kill(training, signal.SIGKILL)
        killed.append(wait(training))
    assert not wait(start(run, disturbed / "runs" / "train" / "last"))
    print(json.dumps({"killed": sum(killed), "ended": killed.count(False)}))


def load() -> RunConfig:
    """Do what every session would: compose the settings, import, describe the layers."""
    register_schemas()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run = to_run(compose("train", overrides=[*TINY, *SETTINGS]))
    check_data(run.data.name, run.data.root)
    for name in LOADED_ONCE:
        importlib.import_module(name)
    accelerator = detect_accelerator("cpu")
    build_planner(run, accelerator).plan(build_setting(run, accelerator))
    return run


def start(run: RunConfig, folder: Path) -> int:
    """Train in a fork; return its process id."""
    child = os.fork()
    if child == 0:
        with resume_folder(run, folder) as at:
            launch_training(run, at, [], hints=False)
        sys.stdout.flush()
        os._exit(0)
    return child


def wait(child: int) -> bool:
    """Wait for the end of a fork; return whether it was killed."""
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0, status
    return os.WIFSIGNALED(status)


def last_saved(folder: Path) -> int:
    """Return the last step that the run in a folder has saved, 0 before the first."""
    latest = [path.read_text() for path in folder.glob("runs/train/*/checkpoints/latest")]
    return max((int(step.strip().removeprefix("step-")) for step in latest), default=0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
