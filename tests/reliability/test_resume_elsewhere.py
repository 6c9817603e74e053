"""A run that stopped somewhere within an epoch goes on with other workers, another launch and another K, to the bit."""

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.reliability.session import Session, assert_same, last_step, run_folder

pytestmark = pytest.mark.reliability
STEPS_AN_EPOCH = 5
SEED = 5

# launch, its own settings, and whether the same command finds the run by itself: another K is another experiment.
SHAPES: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "a process per stage, 2 workers": ("launched", ("data.num_workers=2",), True),
    "K=3, 1 worker": ("launched", ("pipeline.num_stages=3", "data.num_workers=1"), False),
}


@pytest.fixture
def begin() -> Iterator[Callable[..., Session]]:
    sessions: list[Session] = []

    def begin(folder: Path, launch: str, *arguments: str) -> Session:
        sessions.append(Session(folder, launch, *arguments))
        return sessions[-1]

    yield begin
    for session in sessions:
        session.close()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_ends_as_the_undisturbed_one(
    shape: tuple[str, tuple[str, ...], bool], whole: Path, begin: Callable[..., Session], tmp_path: Path
) -> None:
    launch, settings, finds_it = shape
    step = random.Random(f"{SEED} {settings}").randrange(1, STEPS_AN_EPOCH - 2)  # one or two more before it has stopped
    first = begin(tmp_path / "first", "one process")
    first.wait_for(lambda run: last_step(run) >= step)
    first.send(signal.SIGTERM)
    assert first.status() == 75, first.said()
    stopped = run_folder(first.folder)
    assert last_step(stopped) % STEPS_AN_EPOCH != 0
    folder = first.folder if finds_it else tmp_path / "second"
    second = begin(folder, launch, *settings, *([] if finds_it else [f"trainer.resume_from={stopped}"]))
    assert second.status() == 0, second.said()
    assert_same(run_folder(folder), whole)
