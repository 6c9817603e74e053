"""A request to stop reaches every process of a run, and no process outlives the one that it belongs to."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpipe.launch import stops
from gpipe.launch.processes import Place, run
from tests.launch.launched import MANY_SECONDS, PYTHONPATH, is_pending, is_running, note_place, pids, two, wait_until
from tests.support.program_server import Program

SAID = "said.txt"


def hang(place: Place, folder: Path) -> None:
    (folder / f"process-{os.getpid()}").touch()
    time.sleep(MANY_SECONDS)


def stop(place: Place, folder: Path) -> None:
    """Do what training does: go on until asked to stop, and leave with the status of that."""
    hang_until_asked(folder)
    raise SystemExit(stops.STOPPED)


def hang_until_asked(folder: Path) -> None:
    (folder / f"process-{os.getpid()}").touch()
    while (reason := stops.find_reason()) is None:
        time.sleep(0.05)
    (folder / f"asked-{os.getpid()}").write_text(reason)


@contextmanager
def parent_of(function: str, folder: Path) -> Iterator[Program]:
    """Start a process that starts two, and wait until these are at work; what it says goes to `SAID`."""
    program = (
        "from pathlib import Path\nfrom gpipe.launch.processes import run\n"
        f"from tests.launch.launched import two\nfrom tests.launch.test_stops import {function}\n"
        f"if __name__ == '__main__': run({function}, two(Path({str(folder)!r})))\n"
    )
    script = folder / "script.py"
    script.write_text(program)
    (output := folder / SAID).touch()
    parent = Program(script, folder=folder, output=output)
    try:
        wait_until(lambda: len(pids(folder)) == 2)
        yield parent
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, signal.SIGKILL)


@pytest.mark.reliability
@pytest.mark.parametrize("numbers", [[signal.SIGKILL], [signal.SIGINT, signal.SIGINT]], ids=["SIGKILL", "SIGINT twice"])
def test_ending_the_parent_at_once_leaves_no_orphan(tmp_path: Path, numbers: list[signal.Signals]) -> None:
    with parent_of("hang", tmp_path) as parent:
        for number in numbers:
            wait_until(lambda: not is_pending(parent.pid, signal.SIGINT))
            os.kill(parent.pid, number)
        status = parent.wait(MANY_SECONDS / 2)
    wait_until(lambda: not any(map(is_running, pids(tmp_path))))
    if signal.SIGINT in numbers:
        assert status == 130
        said = (tmp_path / SAID).read_text()
        assert said.startswith("error: interrupted, nothing was saved\n")  # Python tells of semaphores after it


@pytest.mark.reliability
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_parent_waits_for_processes_that_it_asked_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    with parent_of("stop", tmp_path) as parent:
        os.kill(parent.pid, number)
        assert parent.wait(MANY_SECONDS / 2) == stops.STOPPED
    assert (tmp_path / SAID).read_text() == ""
    assert [path.read_text() for path in tmp_path.glob("asked-*")] == [number.name] * 2
    assert not any(map(is_running, pids(tmp_path)))


def leave_when_asked(status: int) -> None:
    with stops.listening():
        assert stops.find_reason() is None
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_until(lambda: stops.find_reason() == "SIGUSR2")
        raise SystemExit(status)


LOADING = """
import multiprocessing, time
from gpipe.launch import stops

stops.listen()  # in the other process too, which imports this program

if __name__ == "__main__":
    child = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,), daemon=True)
    child.start()
    print(child.pid)
"""


def test_a_program_that_ends_ends_the_processes_that_load_its_data(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LOADING)
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(
        command, env=os.environ | PYTHONPATH, capture_output=True, text=True, timeout=MANY_SECONDS, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not is_running(int(done.stdout))


LISTENING = """
import time
from gpipe.launch import stops

stops.listen()
print("listening", flush=True)
while stops.find_reason() is None:
    time.sleep(0.01)
print(stops.find_reason())
"""


def test_pauses_at_random_moments_make_no_request_and_nobody_deaf() -> None:
    command = [sys.executable, "-c", LISTENING]
    draw = random.Random(22)
    with subprocess.Popen(command, env=os.environ | PYTHONPATH, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "listening\n"
        for _ in range(4):
            process.send_signal(signal.SIGSTOP)
            time.sleep(draw.uniform(0.1, 0.3))
            process.send_signal(signal.SIGCONT)
            time.sleep(draw.uniform(0, 0.1))
        assert process.poll() is None
        process.send_signal(signal.SIGUSR1)
        assert process.communicate(timeout=MANY_SECONDS / 2) == ("SIGUSR1\n", None)


@pytest.mark.parametrize("ignored", [False, True], ids=["heard", "nohup"])
def test_a_closed_window_is_a_request_unless_it_was_ignored_before(ignored: bool) -> None:
    ignoring = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n" if ignored else ""
    command = [sys.executable, "-c", ignoring + LISTENING]
    with subprocess.Popen(command, env=os.environ | PYTHONPATH, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "listening\n"
        process.send_signal(signal.SIGHUP)
        if ignored:
            process.send_signal(signal.SIGUSR1)
        expected = "SIGUSR1\n" if ignored else "SIGHUP\n"
        assert process.communicate(timeout=MANY_SECONDS / 2) == (expected, None)


def test_a_process_of_torchrun_does_not_outlive_it() -> None:
    torchrun = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {LISTENING!r}])"
    environment = os.environ | PYTHONPATH | {"TORCHELASTIC_RUN_ID": "job"}
    command = [sys.executable, "-c", torchrun]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "listening\n"
        process.kill()
        assert process.communicate(timeout=5) == ("", None)  # which waits until nobody has its output open


def test_requests_are_heard_while_a_body_runs_and_handed_on_where_it_stops() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: received.append(number))
    try:
        for status, expected in ((0, []), (stops.STOPPED, [signal.SIGUSR2])):
            with pytest.raises(SystemExit):
                leave_when_asked(status)
            assert received == expected and stops.find_reason() is None
        os.kill(os.getpid(), signal.SIGUSR2)
        assert received == [signal.SIGUSR2] * 2, "the handler before is back"
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_nothing_is_started_after_a_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stops.listening() as listener:
        listener.request("SIGTERM")
        with pytest.raises(SystemExit) as left:
            run(note_place, two(tmp_path), "never")
    assert left.value.code == stops.STOPPED
    assert capsys.readouterr().out == "stopped by SIGTERM before the first step: repeat the command to resume.\n"
    assert list(tmp_path.iterdir()) == []


def test_processes_that_hear_of_a_request_while_they_start_run_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with stops.listening() as listener:
        listener.request("SIGHUP")
        monkeypatch.setattr(stops, "exit_before_start", lambda _: None)  # here, as if the request came a moment later
        with pytest.raises(SystemExit) as left:
            run(note_place, two(tmp_path), "never")
    assert left.value.code == stops.STOPPED
    assert capfd.readouterr() == ("stopped by SIGHUP before the first step: repeat the command to resume.\n", "")
    assert list(tmp_path.iterdir()) == []


def test_time_is_a_request_of_its_own() -> None:
    with stops.listening():
        assert stops.find_reason(max_hours=1.0) is None
        assert stops.find_reason(max_hours=1e-9) == stops.find_reason() == "trainer.max_hours=1e-09"
