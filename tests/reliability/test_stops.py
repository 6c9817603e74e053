"""A signal at any moment stops a run in good order, in each launch, and the same command goes on."""

import os
import random
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.reliability.session import LAUNCHES, Session, assert_same, last_step, run_folder, saved_steps

pytestmark = pytest.mark.reliability
NUM_STEPS = 10  # in two epochs, which leave out an incomplete mini-batch

# As soon as this holds of the run's folder, the signal comes.
MOMENTS: dict[str, Callable[[Path], bool]] = {
    "start-up": lambda run: (run / "config.yaml").exists(),
    "step": lambda run: last_step(run) >= 2,
    "evaluation": lambda run: last_step(run) >= NUM_STEPS // 2,
    "save": lambda run: any((run / "checkpoints").glob("*step-00000001*")),
}
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]

# As soon as this holds of a run that starts, from the moment that it listens until it builds its model.
STARTS: dict[str, Callable[[Session], bool]] = {
    "it listens": lambda session: session.listens_to(signal.SIGTERM),
    "it loads torch": lambda session: session.has_loaded("libtorch_cpu"),
    "torch has loaded the network": lambda session: session.has_loaded("_ssl"),
    "the checkpoints or a process are loaded": lambda session: (
        session.has_loaded("_safetensors") or bool(session.pids_of("multiprocessing.forkserver"))
    ),
}
START_SIGNALS = [signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGQUIT]
# Each launch with two of the moments, and each moment with a signal of its own: all of them would take half an hour.
STOPS = [
    ("launched", "start-up", signal.SIGTERM),
    ("torchrun", "start-up", signal.SIGTERM),
    ("one process", "step", signal.SIGINT),
    ("torchrun", "step", signal.SIGUSR1),
    ("launched", "evaluation", signal.SIGUSR1),
    ("launched", "save", signal.SIGHUP),
]


def check_stopped(session: Session, launch: str, number: signal.Signals) -> None:
    """What a stop looks like: its status, its last word, and a checkpoint of the last step that was done."""
    status = session.status()
    assert status == (1 if launch == "torchrun" else 75), session.said()
    run = run_folder(session.folder)
    step = last_step(run)
    assert step < NUM_STEPS
    where = f"after step {step}" if step else "before the first step"
    assert f"stopped by {number.name} {where}: repeat the command to resume." in session.said()
    assert saved_steps(run)[-1:] == ([step] if step else [])
    assert not (run / "record.json").exists() and not (run / "error.txt").exists()


@pytest.mark.parametrize(("launch", "moment", "number"), STOPS)
def test_a_signal_at_any_moment_stops_it_and_the_same_command_goes_on(
    whole: Path, begin: Callable[..., Session], launch: str, moment: str, number: signal.Signals
) -> None:
    every = ["trainer.checkpoints.every_steps=1"] if moment == "save" else []
    session = begin(launch, *every)
    session.wait_for(MOMENTS[moment])
    session.send(number)
    check_stopped(session, launch, number)
    assert last_step(whole) == NUM_STEPS
    again = begin(launch, *every)
    assert again.status() == 0, again.said()
    assert "resuming runs/train/" in again.said()
    assert_same(run_folder(again.folder), whole)


@pytest.mark.parametrize(("launch", "number"), [*zip(LAUNCHES, SIGNALS, strict=True)])
def test_a_signal_to_all_processes_is_one_request(
    begin: Callable[..., Session], launch: str, number: signal.Signals
) -> None:
    """As Ctrl-C in a terminal, or SLURM; processes that load data get it too."""
    session = begin(launch, "data.num_workers=1")
    session.wait_for(MOMENTS["step"])
    session.send(number, to_all=True)
    check_stopped(session, launch, number)


@pytest.mark.alone  # five seconds are those of a machine that does nothing else
@pytest.mark.parametrize("launch", ["one process", "launched"])
@pytest.mark.parametrize(("moment", "number"), [*zip(STARTS, START_SIGNALS, strict=True)])
def test_a_signal_before_anything_is_there_leaves_nothing(
    begin: Callable[..., Session], launch: str, moment: str, number: signal.Signals
) -> None:
    session = begin(launch, anew=True)
    session.wait_until(partial(STARTS[moment], session))
    check_stopped_before_the_start(session, number, lambda: session.send(number, to_all=number == signal.SIGHUP))


@pytest.mark.alone
def test_a_signal_to_one_process_before_it_has_met_the_others_stops_all(begin: Callable[..., Session]) -> None:
    session = begin("launched", anew=True)
    started = session.wait_for_copies(2)
    check_stopped_before_the_start(session, signal.SIGUSR1, lambda: os.kill(max(started), signal.SIGUSR1))


def check_stopped_before_the_start(session: Session, number: signal.Signals, send: Callable[[], None]) -> None:
    """Send a signal, and see the start end in good order within five seconds, perhaps after it has printed its plan."""
    begun = time.monotonic()
    send()
    assert session.status() == 75, session.said()
    assert time.monotonic() - begun < 5
    *plan, last = session.said().splitlines()
    assert last == f"stopped by {number.name} before the first step: repeat the command to resume."
    assert not any("rror" in line or "connectFullMesh" in line for line in plan)


def test_a_run_that_is_paused_at_random_moments_still_hears(begin: Callable[..., Session]) -> None:
    session = begin("launched", "pipeline.timeout_seconds=4", "trainer.num_epochs=100")
    session.wait_for(MOMENTS["step"])
    draw = random.Random(22)
    for longest in (0.4, 0.4, 0.4, 6.0):  # the last one is longer than the time-out
        session.send(signal.SIGSTOP, to_all=True)
        time.sleep(draw.uniform(0.75, 1) * longest)
        session.send(signal.SIGCONT, to_all=True)
        time.sleep(draw.uniform(0, 0.2))
    session.send(signal.SIGTERM)
    assert session.status() == 75, session.said()
    run = run_folder(session.folder)
    assert saved_steps(run)[-1:] == [last_step(run)] and not (run / "error.txt").exists()


def test_a_process_that_hangs_while_it_starts_is_named_within_the_time_out(begin: Callable[..., Session]) -> None:
    session = begin("launched", "pipeline.timeout_seconds=5", anew=True)
    begun = time.monotonic()
    started = session.wait_for_copies(2)
    os.kill(max(started), signal.SIGSTOP)
    assert session.status() == 1
    assert re.search(r"error: TimeoutError: (process 0|the processes \[1\]) did not join within \d", session.said())
    assert time.monotonic() - begun < 60


def test_a_closed_window_is_nothing_to_a_run_under_nohup(whole: Path, begin: Callable[..., Session]) -> None:
    session = begin("launched", ignored=[signal.SIGHUP])
    session.wait_for(MOMENTS["step"])
    session.send(signal.SIGHUP, to_all=True)
    assert session.status() == 0, session.said()
    assert_same(run_folder(session.folder), whole)


def test_workers_end_with_a_torchrun_that_is_killed(begin: Callable[..., Session]) -> None:
    session = begin("torchrun", "data.num_workers=1")
    session.wait_for(MOMENTS["step"])
    session.send(signal.SIGKILL)
    assert session.status() == -signal.SIGKILL  # and nothing is left


def test_a_tee_that_dies_ends_nothing_and_a_stop_is_one(begin: Callable[..., Session]) -> None:
    session = begin("launched", piped=True)
    session.wait_for(MOMENTS["step"])
    session.close_pipe()
    session.send(signal.SIGINT)
    assert session.status() == 75
    run = run_folder(session.folder)
    assert saved_steps(run) == [last_step(run)] and not (run / "error.txt").exists()


@pytest.mark.parametrize("launch", ["one process", "launched"])
@pytest.mark.parametrize("to_all", [False, True], ids=["to one", "to all"])
def test_a_second_interrupt_ends_it_at_once(begin: Callable[..., Session], launch: str, to_all: bool) -> None:
    session = begin(
        launch, "data.max_images=1400", "trainer.batch_size=700", "pipeline.num_microbatches=1", "data.num_workers=1"
    )
    session.wait_for(lambda run: last_step(run) >= 1)  # the second one, with many images, is under way
    session.send(signal.SIGINT, to_all=to_all)
    session.wait_for(lambda _: not session.is_pending(signal.SIGINT))
    session.send(signal.SIGINT, to_all=to_all)
    begun = time.monotonic()
    assert session.status() == 130, session.said()
    assert time.monotonic() - begun < 8
    assert "error: interrupted, nothing was saved\n" in session.said()


def test_a_time_limit_stops_by_itself(begin: Callable[..., Session]) -> None:
    session = begin("launched", "trainer.max_hours=0.00001")
    assert session.status() == 75, session.said()
    assert "stopped by trainer.max_hours=1e-05 before the first step: repeat the command to resume." in session.said()


def test_a_job_that_submitit_warns_of_its_time_limit_is_saved_queued_again_and_goes_on(
    whole: Path, begin: Callable[..., Session]
) -> None:
    """As at SLURM, by submitit's local executor: its warning, SIGUSR2, comes before the job is killed."""
    session = begin("one process", "-m", "hydra/launcher=submitit_local", "launch=process_per_stage")
    session.wait_for(MOMENTS["step"])
    (job,) = session.pids_of("submitit.core._submit")
    os.kill(job, signal.SIGUSR2)
    assert session.status() == 0, session.said()
    assert_same(run_folder(session.folder), whole)
    (log,) = session.folder.glob("runs/*/.submitit/*/*_log.out")
    words = log.read_text(encoding="utf-8")
    assert words.count("stopped by SIGUSR2 after step ") == words.count("resuming after step ") == 1
