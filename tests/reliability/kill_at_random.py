"""Train in a process that is killed at random moments, and once more to the end.

    kill_at_random.py FOLDER KILLS SECONDS SEED

Each session is a fork of this process, which has imported everything: so a session is short. It is killed, by SIGKILL,
within SECONDS after its start. Prints how many sessions were killed, how many ended before, and the last one's seconds.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from hydra import compose, initialize_config_dir

from gpipe.config import register_schemas, to_run
from gpipe.data import check_data
from gpipe.programs.resume import resume_folder
from gpipe.programs.train import launch_training
from tests.reliability.session import ROOT, TINY


def main(folder: Path, num_kills: int, seconds: float, seed: int) -> None:
    register_schemas()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run = to_run(compose("train", overrides=[*TINY, "trainer.num_epochs=3", "trainer.checkpoints.every_steps=1"]))
    check_data(run.data.name, run.data.root)
    import sklearn.datasets  # noqa: F401  (loads the digits; half a second that no session needs to spend again)

    draw = random.Random(seed)
    ends = {"killed": 0, "ended": 0}
    began = time.monotonic()
    for number in range(num_kills + 1):
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            with resume_folder(run, folder / "runs" / "train" / f"session-{number:03}") as at:
                launch_training(run, at, [], hints=False)
            sys.stdout.flush()
            os._exit(0)
        if number < num_kills:
            time.sleep(draw.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        ends["killed" if os.WIFSIGNALED(status) else "ended"] += 1
        assert os.WIFSIGNALED(status) or status == 0, status
    print(json.dumps({**ends, "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
