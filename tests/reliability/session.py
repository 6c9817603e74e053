"""Runs of train.py as processes of the system: start one, wait for a moment of it, see what it left."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.launch.launched import is_pending
from tests.support.program_server import TORCHRUN, Program

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "train.py"
LONG_SECONDS = 120.0
TINY = (
    "data=digits",
    "data.image_size=32",
    "data.num_workers=0",
    "data.max_images=80",
    "model.num_filters=8",
    "trainer.num_epochs=2",
    "trainer.batch_size=16",
    "trainer.evaluation.batch_size=8",
    "trainer.evaluation.max_batches=2",
    "trainer.evaluation.statistics_batches=1",
    "trainer.timeline_every_steps=null",
    "pipeline.num_microbatches=2",
    "schedule.warm_up_epochs=0",
    "launch.num_threads=1",
    "launch.device=cpu",
    "tracking=disabled",
)
_TORCHRUN = ["--standalone", "--nproc-per-node=2", "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"]
LAUNCHES: dict[str, tuple[list[str], list[str]]] = {
    "one process": ([], []),
    "launched": ([], ["launch=process_per_stage"]),
    "torchrun": ([*_TORCHRUN, str(TRAIN)], []),
}
_MACHINES = {"examples_per_second", "step_seconds", "peak_memory_bytes", "wait_seconds", "bubble"}


class Session:
    """A run of train.py in a session of its own, so that whatever it leaves behind can be found.

    piped: what it says goes into a pipe, which nobody reads until `close_pipe`, instead of a file.
    anew: Python itself starts too; else the program is a fork of a process that has loaded what it imports.
    how: what else a `Program` is told.
    """

    def __init__(
        self, folder: Path, launch: str, *arguments: str, piped: bool = False, anew: bool = False, **how: Any
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        torchrun, own = LAUNCHES[launch]
        flags = [word for word in arguments if word.startswith("-")]  # train.py wants them first
        settings = [word for word in arguments if word not in flags]  # the last of several values counts
        words = [*torchrun, *flags, *TINY, *own, *settings]
        output = folder / "output.txt"
        output.write_text("")
        self._pipe = os.pipe() if piped else ()
        if piped:
            output = Path(f"/proc/{os.getpid()}/fd/{self._pipe[1]}")
        self._process: Program | subprocess.Popen[bytes]
        if not anew:
            program = TORCHRUN if torchrun else TRAIN
            self._process = Program(program, *words, folder=folder, output=output, OMP_NUM_THREADS="1", **how)
            return
        assert not torchrun and not piped and not how
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        with output.open("a") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(TRAIN), *words],
                cwd=folder,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def close_pipe(self) -> None:
        """Leave the run alone with its output, as a `tee` that dies."""
        for end in self._pipe:
            os.close(end)

    def wait_for(self, moment: Callable[[Path], bool]) -> None:
        """Wait until something holds of the run's folder."""
        self.wait_until(lambda: any(moment(path) for path in self.folder.glob("runs/*/*")))

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, while the process that was started runs."""
        deadline = time.monotonic() + LONG_SECONDS
        while not holds():
            assert self._process.poll() is None, f"it ended before:\n{self.said()}"
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.005)

    def has_ended(self) -> bool:
        """Return whether the process that was started has ended."""
        return self._process.poll() is not None

    def send(self, number: signal.Signals, *, to_all: bool = False) -> None:
        """Send a signal to the process that was started, or to its whole group, as a terminal does."""
        if to_all:
            os.killpg(self._process.pid, number)
        else:
            os.kill(self._process.pid, number)

    def is_pending(self, number: signal.Signals) -> bool:
        """Return whether a signal waits for the process that was started, where a second one would be lost in it."""
        return is_pending(self._process.pid, number)

    def listens_to(self, number: signal.Signals) -> bool:
        """Return whether the process that was started has blocked a signal, which a thread of it takes then."""
        (mask,) = re.findall(r"SigBlk:\t(\w+)", Path(f"/proc/{self._process.pid}/status").read_text())
        return bool(int(mask, 16) >> (number - 1) & 1)

    def has_loaded(self, library: str) -> bool:
        """Return whether the process that was started has a shared library in its memory."""
        return library in Path(f"/proc/{self._process.pid}/maps").read_text()

    def pids_of(self, word: str) -> list[int]:
        """Return the processes of the session that have a word in their command lines."""
        found = []
        for pid in self._left():
            with suppress(OSError):  # ended meanwhile
                if word in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(pid)
        return found

    def wait_for_copies(self, count: int) -> list[int]:
        """Wait until the run has so many processes that are copies of its fork server, and return them."""
        deadline = time.monotonic() + LONG_SECONDS
        while True:
            alike = self.pids_of("multiprocessing.forkserver")
            # Numbers of processes start again at the limit: the server's is not always the least.
            copies = [pid for pid in alike if (place := _place_of(pid)) is not None and place[0] in alike]
            if len(copies) >= count:
                return copies
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.005)

    def children_named(self, name: str) -> list[int]:
        """Return the processes of a name that those of the session have started, in sessions of their own too."""
        own, found = set(self._left()), []
        for pid in _pids():
            with suppress(OSError):  # ended meanwhile
                status = Path(f"/proc/{pid}/status").read_text()
                fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
                if fields["Name"].strip() == name and int(fields["PPid"]) in own:
                    found.append(pid)
        return found

    def status(self) -> int:
        """Wait for the end, and until nothing is left of the session; return the exit status."""
        status = self._process.wait(LONG_SECONDS)
        deadline = time.monotonic() + 10
        while left := self._left():
            assert time.monotonic() < deadline, f"orphans: {left}"
            time.sleep(0.1)
        return status

    def said(self) -> str:
        """Return what it wrote to the terminal."""
        return (self.folder / "output.txt").read_text(encoding="utf-8")

    def close(self) -> None:
        """End what is left of it."""
        for pid in self._left():
            os.kill(pid, signal.SIGKILL)
        self._process.wait(LONG_SECONDS)

    def _left(self) -> list[int]:
        return left_of(self._process.pid)


def run_folder(folder: Path) -> Path:
    """Return the folder of the only run."""
    (found,) = (path.parent for path in folder.glob("runs/*/*/config.yaml"))
    return found


def log_of(run: Path) -> list[dict[str, Any]]:
    """Return the log of steps and evaluations, without what depends on the machine."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if key not in _MACHINES} for line in lines if "epoch" in line]


def last_step(run: Path) -> int:
    """Return the last step in the log of a run that may be under way, 0 where there is none."""
    if not (run / "metrics.jsonl").exists():
        return 0
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    steps = [json.loads(line)["step"] for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return max(steps, default=0)


def saved_steps(run: Path) -> list[int]:
    """Return the steps of which there are checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*"))


def state_of(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights, averages and optimiser state in the newest checkpoint, by kind and name."""
    checkpoint = run / "checkpoints" / (run / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    return {
        f"{path.name.partition('-')[0]}: {name}": tensor
        for path in checkpoint.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def assert_same(run: Path, whole: Path) -> None:
    """Compare all that two runs came to, bit by bit."""
    found, expected = state_of(run), state_of(whole)
    assert found.keys() == expected.keys() and len(expected) > 20
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    assert log_of(run) == log_of(whole)


def left_of(session: int) -> list[int]:
    """Return the processes of a session of the system that still run."""
    return [pid for pid in _pids() if (place := _place_of(pid)) is not None and place[1] == session]


def _pids() -> Sequence[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _place_of(pid: int) -> tuple[int, int] | None:
    """Return the parent and the session of a process that still runs."""
    try:
        state, parent, _, session, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(parent), int(session)) if state != "Z" else None
