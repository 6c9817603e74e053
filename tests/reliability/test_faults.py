"""Whatever fails, wherever: all processes end in time, none is left behind, and the last lines say what and where.

Each fault happens once in each place, and the stage goes round: first, middle, last, first, ... Left out are: the other
two stages of each pair of fault and place; exit(0) in backward and evaluation, for others see it as they see SIGKILL;
an allocation that fails outside of a layer and a MemoryError inside, which are errors like any other; a full disk
where nothing is written.

With GPIPE_FAULT_RECORDS=<file>, each test adds a line to that file, for the README's table (reproductions.faults).
"""

import ctypes
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.program_server import run_program

ROOT = Path(__file__).parents[2]
FAULTY_RUN = Path(__file__).with_name("faulty_run.py")
TIMEOUT_SECONDS = 5.0
UNHURRIED_SECONDS = 60.0  # where nothing is about time-outs
WORKER_TIMEOUT_SECONDS = 15.0  # a worker of the loader loads its modules in that time, on a busy machine too
GRACE_SECONDS = 5.0
STAGES = ("first", "middle", "last")
RUN = (
    "model=transformer_lm_small", "data=random_tokens", "model.num_layers=4", "model.model_size=16",
    "model.feedforward_size=24", "data.vocabulary_size=60", "data.sequence_length=12", "data.num_train=64",
    "trainer.batch_size=16", "trainer.evaluation.batch_size=16", "trainer.max_steps=6",
    "trainer.checkpoints.every_steps=2", "trainer.timeline_every_steps=null", "schedule.name=constant",
    "schedule.warm_up_epochs=0", "tracking=disabled", "launch=process_per_stage", "launch.num_threads=1",
    "launch.device=cpu", "pipeline.num_stages=3", "pipeline.num_microbatches=4", "hydra.run.dir=run",
)  # fmt: skip
IMAGES = (
    "model.num_filters=8", "data.image_size=32", "data.num_workers=1", "trainer.batch_size=16", "trainer.max_steps=8",
    "trainer.timeline_every_steps=null", "schedule.warm_up_epochs=0", "tracking=disabled", "launch=process_per_stage",
    "launch.num_threads=1", "launch.device=cpu", "hydra.run.dir=run",
)  # fmt: skip
IN_LAYER = r"micro-batch 2, layer \d+ \(\w+\), "
DOING = {
    "forward": IN_LAYER + "forward",
    "backward": IN_LAYER + "backward",
    "evaluation": IN_LAYER + "evaluation",
    "loading": r"loading mini-batch 3\b",
    "save": r"saving after step 4\b",
    "worker": r"loading mini-batch \d",
}
CAUSE = {
    "raise": "on purpose",
    "memory": "MemoryError: on purpose",
    "allocate": "can't allocate memory: you tried to allocate 4294967296 bytes",
    "kill": "gone without a word",
    "exit": "gone without a word",
    "hang": "does not answer",
    "stop": "does not answer",
}
PLACES = ("forward", "backward", "loading", "evaluation", "save")
WHERE = {
    "raise": PLACES,
    "kill": PLACES,
    "hang": PLACES,
    "stop": PLACES,
    "exit": ("forward", "save"),  # ends like kill
    "allocate": ("forward", "backward"),
    "memory": ("loading", "evaluation", "save"),
}
CELLS = [
    (action, place, (row + PLACES.index(place)) % 3) for row, action in enumerate(WHERE) for place in WHERE[action]
]

pytestmark = [pytest.mark.reliability, pytest.mark.xdist_group("faults")]  # most wait, beside others that compute


@dataclass(frozen=True)
class Ended:
    """What came of a run: its exit status, its last words, seconds from the damage to its end, and its time-out."""

    status: int
    said: str
    seconds: float
    timeout_seconds: float
    folder: Path


def run_with(
    folder: Path,
    rank: int,
    place: str,
    action: str,
    *overrides: str,
    timeout_seconds: float = TIMEOUT_SECONDS,
    times: int = 1,
    may_go_on: bool = False,
) -> Ended:
    """Run a training with a fault in it, in so many tries; fail where a process outlives the time that it has.

    may_go_on: after the damage it may take any time, and the time-out is a long one.
    """
    timeout_seconds = UNHURRIED_SECONDS if may_go_on else timeout_seconds
    fault = json.dumps({"rank": rank, "place": place, "action": action, "times": times})
    overrides = (*overrides, f"pipeline.timeout_seconds={timeout_seconds}")
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "GPIPE_FAULT": fault}
    done = run_program(FAULTY_RUN, *overrides, folder=folder, warn="ignore", **environment)
    end = time.time()
    assert (folder / "damage").exists(), f"the run failed before the damage:\n{done.stderr}"
    damage = end if may_go_on else float((folder / "damage").read_text())
    while left := processes_in(folder):
        assert time.time() < damage + timeout_seconds + GRACE_SECONDS, f"left behind: {left}"
        time.sleep(0.1)
    return Ended(done.returncode, done.stderr, end - damage, timeout_seconds, folder)


def processes_in(folder: Path) -> dict[int, str]:
    """Return the command lines, by process id, of running processes whose working folder this is, or is inside."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").readlink().is_relative_to(folder):
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:  # ended meanwhile, or somebody else's
                continue
    return found


def wait_for_file(path: Path, seconds: float) -> None:
    """Wait until a file is there; fail after some seconds."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.1)


def assert_ended(ended: Ended, words: list[str]) -> None:
    """Check that a run ended in time, with the status of an error, and said some words in its last lines."""
    assert ended.status == 1, ended.said
    assert ended.seconds < ended.timeout_seconds + GRACE_SECONDS
    last = "\n".join(ended.said.splitlines()[-4:])
    for word in words:
        assert re.search(word, last), f"{word!r} is not in\n{ended.said}"


def record(ended: Ended, place: str, action: str, stage: str) -> None:
    """Add what happened to the file of records, where one is asked for."""
    if (path := os.environ.get("GPIPE_FAULT_RECORDS")) is None:
        return
    log = (ended.folder / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    steps = [json.loads(line) for line in log if line.endswith("\n")]  # a full disk cuts the last one short
    latest = ended.folder / "run" / "checkpoints" / "latest"
    saved = int(latest.read_text().strip().removeprefix("step-")) if latest.exists() else 0
    row = {
        "fault": action,
        "place": place,
        "stage": stage,
        "seconds": round(ended.seconds, 2),
        "timeout_seconds": ended.timeout_seconds,
        "said": _message(ended.said),
        "steps_done": max((line["step"] for line in steps), default=0),
        "steps_saved": saved,
    }
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _message(said: str) -> str:
    """Return the first message in a line, with its place, and without what differs from machine to machine."""
    lines = said.splitlines()
    first = next(line for line in lines if line.startswith("error: "))
    place = next((f" {line}" for line in lines if line.startswith("(in ")), "")
    return re.sub(r"process \d+ on [\w.-]+", "process <pid> on <host>", first.removeprefix("error: ")) + place


@pytest.mark.parametrize(("action", "place", "stage"), CELLS)
def test_a_fault_ends_the_run(action: str, place: str, stage: int, tmp_path: Path) -> None:
    ended = run_with(tmp_path, stage, place, action, *RUN)
    # The process that waits for a save that hangs blames the disk.
    cause = "the disk has not answered for 5 s" if (action, place) == ("hang", "save") else CAUSE[action]
    words = [f"rank {stage}\\b", f"stage {stage}\\b", DOING[place], cause]
    assert_ended(ended, words)
    record(ended, place, action, STAGES[stage])


@pytest.mark.parametrize("stage", [0, 2])
def test_a_file_that_is_too_large_is_named(stage: int, tmp_path: Path) -> None:
    ended = run_with(tmp_path, stage, "save", "limit", *RUN)
    file = r"run/metrics\.jsonl" if stage == 0 else r"checkpoints/\S*step-0*2\S*"
    assert_ended(ended, ["File too large", file])
    record(ended, "log" if stage == 0 else "save", "full disk", STAGES[stage])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 100 kB where the checkpoints go."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=100k") != 0:
        pytest.skip("only root may mount the small disk that fills up")
    yield folder
    libc.umount2(str(folder).encode(), 2)


def test_a_full_disk_is_named(small_disk: Path, tmp_path: Path) -> None:
    ended = run_with(tmp_path, 0, "save", "note", *RUN)
    assert_ended(ended, ["No space left", r"checkpoints/\S*step-0*2"])
    record(ended, "save", "full disk", "any")


@pytest.mark.parametrize("action", ["raise", "kill", "hang", "stop"])
def test_a_fault_in_a_worker_of_the_loader_ends_the_run(action: str, tmp_path: Path) -> None:
    ended = run_with(tmp_path, 0, "worker", action, *IMAGES, timeout_seconds=WORKER_TIMEOUT_SECONDS)
    cause = {"kill": "DataLoader worker", "raise": "on purpose"}.get(action, "does not answer")
    assert_ended(ended, ["rank 0\\b", "stage 0\\b", DOING["worker"], cause])
    record(ended, "worker", action, "first")


def test_workers_of_a_process_that_is_killed_end_too(tmp_path: Path) -> None:
    ended = run_with(tmp_path, 0, "loading", "kill", *IMAGES, timeout_seconds=WORKER_TIMEOUT_SECONDS)
    assert_ended(ended, ["rank 0\\b", DOING["loading"]])
