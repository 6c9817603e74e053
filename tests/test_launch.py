"""Processes start together, end together, and speak once when something fails."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gpipe.launch import devices, processes, stops
from gpipe.launch.errors import one_message
from gpipe.launch.processes import Place, Processes, run

ROOT = Path(__file__).parents[1]
PYTHONPATH = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
MANY_SECONDS = 60  # a process that outlives this was not ended


def two(folder: Path, **changes: object) -> Processes:
    settings = {
        "num_stages": 2, "num_replicas": 1, "num_processes": 2, "num_threads": 1, "device": "cpu",
        "timeout_seconds": 30.0, "folder": folder,
    }  # fmt: skip
    return Processes(**(settings | changes))


def note_place(place: Place, folder: Path, word: str) -> None:
    coordinate = None if place.mesh is None else list(place.mesh.get_coordinate())
    rank = 0 if place.mesh is None else dist.get_rank()
    shared = place.share("rank", f"from {rank}")
    text = f"{word} {coordinate} {place.is_main} {torch.get_num_threads()} {shared}"
    (folder / f"{rank}.txt").write_text(text)


def fail(place: Place, folder: Path, how: str) -> None:
    (folder / f"process-{os.getpid()}").touch()
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise {"sentence": ValueError("batch_size is 3, expected 4."), "bug": KeyError("width")}[how]
    if how == "bug":
        raise RuntimeError("the other one is gone")
    time.sleep(MANY_SECONDS)


def hang(place: Place, folder: Path) -> None:
    (folder / f"process-{os.getpid()}").touch()
    time.sleep(MANY_SECONDS)


def hang_before(place: Place, folder: Path, what: str) -> None:
    if dist.get_rank() == 0:
        time.sleep(MANY_SECONDS)
    if what == "a value":
        place.share("word", "from the other")
    dist.new_group(timeout=timedelta(seconds=1))


def note_origin(place: Place, folder: Path) -> None:
    """Note what starts this process, whether a module was there before, and a variable."""
    origin = {"parent": os.getppid(), "loaded": "colorsys" in sys.modules, "variable": os.environ["VARIABLE"]}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(origin))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")


def pids(folder: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in folder.glob("process-*")]


def test_one_process_stays_in_this_one(tmp_path: Path) -> None:
    run(note_place, two(tmp_path, num_processes=1), "here")
    assert [path.name for path in tmp_path.iterdir()] == ["0.txt"]
    assert (tmp_path / "0.txt").read_text() == "here None True 1 from 0"


def test_processes_are_started_as_neighbouring_stages(tmp_path: Path) -> None:
    run(note_place, two(tmp_path), "there")
    assert (tmp_path / "0.txt").read_text() == "there [0, 0] True 1 from 0"
    assert (tmp_path / "1.txt").read_text() == "there [0, 1] False 1 from 0"


def note_cores(place: Place, folder: Path) -> None:
    rank = 0 if place.mesh is None else dist.get_rank()
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    (folder / f"cores-{rank}.txt").write_text(f"{cores} {torch.get_num_threads()} {os.getpid()} {place.num_cores}")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_pinned_processes_are_new_and_have_cores_of_their_own(tmp_path: Path, num_processes: int) -> None:
    before = os.sched_getaffinity(0)
    run(note_cores, two(tmp_path, num_stages=num_processes, num_processes=num_processes, pin_cores=True))
    found = [(tmp_path / f"cores-{rank}.txt").read_text().split() for rank in range(num_processes)]
    assert [cores for cores, *_ in found] == [str(core) for core in sorted(before)[:num_processes]]
    assert {(threads, available) for _, threads, _, available in found} == {("1", str(len(before)))}
    assert str(os.getpid()) not in [pid for _, _, pid, _ in found]
    assert os.sched_getaffinity(0) == before


def test_cores_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "own_cores", lambda: [3, 5])
    with pytest.raises(
        devices.DevicesMissing, match=r"^this run needs 4 cores, 2 are here: set launch\.pin_cores=fals"
    ):
        devices.check_devices(2, "cpu", 2, True)
    devices.check_devices(2, "cpu", None, True)
    devices.check_devices(4, "cpu", 2, False)
    with pytest.raises(ValueError, match="process 2 of this host finds 0 of 1 cores left"):
        devices.pin(1, 2)


def test_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(devices.DevicesMissing, match=r"^this run needs 2 GPUs, 1 is here: set launch\.device=cpu"):
        devices.check_devices(2, "auto", None, False)
    devices.check_devices(1, "auto", None, False)
    devices.check_devices(2, "cpu", None, False)


def test_replicas_are_rows_of_the_mesh(tmp_path: Path) -> None:
    run(note_place, two(tmp_path, num_stages=1, num_replicas=2), "there")
    assert (tmp_path / "1.txt").read_text().startswith("there [1, 0] False")


def test_torchruns_processes_are_adopted_and_share_the_first_ones_folder(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom pathlib import Path\nfrom gpipe.launch.processes import run\n"
        "from tests.test_launch import note_place, two\n"
        f"folder = Path({str(tmp_path)!r}) / os.environ['RANK'].replace('0', '')\n"
        "run(note_place, two(folder, num_processes=1), 'there')\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run(
        torchrun, check=True, timeout=MANY_SECONDS, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    )
    assert (tmp_path / "0.txt").read_text() == "there [0, 0] True 1 from 0"
    assert (tmp_path / "1.txt").read_text() == "there [0, 1] False 1 from 0"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("sentence", "error: batch_size is 3, expected 4."),
        ("bug", "error: "),
        ("killed", "error: process "),
    ],
)
def test_one_failing_process_ends_all_with_one_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str, message: str
) -> None:
    begin = time.monotonic()
    with pytest.raises(SystemExit) as end:
        run(fail, two(tmp_path), how)
    assert time.monotonic() - begin < MANY_SECONDS / 2
    said = capfd.readouterr().err
    assert end.value.code == 1
    assert said.startswith(message)
    assert said.count("error") == 1 + said.count("error.txt")
    assert "Traceback" not in said
    assert len(pids(tmp_path)) == 2
    assert not any(map(is_running, pids(tmp_path)))
    if how != "killed":
        assert "Traceback" in (tmp_path / "error.txt").read_text()


def stop(place: Place, folder: Path) -> None:
    """Do what training does: go on until asked to stop, and leave with the status of that."""
    hang_until_asked(folder)
    raise SystemExit(stops.STOPPED)


def hang_until_asked(folder: Path) -> None:
    (folder / f"process-{os.getpid()}").touch()
    while (reason := stops.reason()) is None:
        time.sleep(0.05)
    (folder / f"asked-{os.getpid()}").write_text(reason)


def parent_of(function: str, folder: Path) -> subprocess.Popen[str]:
    """Start a process that starts two, and wait until these are at work."""
    program = (
        "from pathlib import Path\nfrom gpipe.launch.processes import run\n"
        f"from tests.test_launch import {function}, two\n"
        f"if __name__ == '__main__': run({function}, two(Path({str(folder)!r})))\n"
    )
    script = folder / "script.py"
    script.write_text(program)
    environment = os.environ | PYTHONPATH
    parent = subprocess.Popen([sys.executable, str(script)], env=environment, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(pids(folder)) == 2)
    return parent


@pytest.mark.reliability
@pytest.mark.parametrize("numbers", [[signal.SIGKILL], [signal.SIGINT, signal.SIGINT]], ids=["SIGKILL", "SIGINT twice"])
def test_ending_the_parent_at_once_leaves_no_orphan(tmp_path: Path, numbers: list[signal.Signals]) -> None:
    with parent_of("hang", tmp_path) as parent:
        for number in numbers:
            parent.send_signal(number)
            time.sleep(0.5)
        said = parent.communicate(timeout=MANY_SECONDS / 2)[1]
    wait_until(lambda: not any(map(is_running, pids(tmp_path))))
    if signal.SIGINT in numbers:
        assert parent.returncode == 130
        assert said.startswith("error: interrupted, nothing was saved\n")  # Python tells of semaphores after it


@pytest.mark.reliability
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_parent_waits_for_processes_that_it_asked_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    with parent_of("stop", tmp_path) as parent:
        parent.send_signal(number)
        said = parent.communicate(timeout=MANY_SECONDS / 2)[1]
    assert (parent.returncode, said) == (stops.STOPPED, "")
    assert [path.read_text() for path in tmp_path.glob("asked-*")] == [number.name] * 2
    assert not any(map(is_running, pids(tmp_path)))


def leave_when_asked(status: int) -> None:
    with stops.listening():
        assert stops.reason() is None
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_until(lambda: stops.reason() == "SIGUSR2")
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


COLLECTING = """
import gc
from gpipe.launch import collector

collector.rest()
assert not gc.isenabled()
collector.work()
kept = gc.get_freeze_count()
assert gc.isenabled() and kept > 1000
collector.work()
assert gc.get_freeze_count() == kept
"""


def test_only_what_was_loaded_while_the_collector_rested_is_never_searched(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COLLECTING]
    done = subprocess.run(command, env=os.environ | PYTHONPATH, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


LISTENING = """
import time
from gpipe.launch import stops

stops.listen()
print("listening", flush=True)
while stops.reason() is None:
    time.sleep(0.01)
print(stops.reason())
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
            time.sleep(0.3)
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


PRINTING = """
import sys, time
from gpipe.launch import terminal

terminal.outlive_readers()
print("listening", flush=True)
sys.stdin.read()
print("to nobody", flush=True)
print("to nobody either")
print("done", file=sys.stderr)
"""


def test_a_reader_that_is_gone_ends_no_program() -> None:
    command = [sys.executable, "-c", PRINTING]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=os.environ | PYTHONPATH, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "listening\n"
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == "done\n"
    assert process.returncode == 0


def test_requests_are_heard_while_a_body_runs_and_handed_on_where_it_stops() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: received.append(number))
    try:
        for status, expected in ((0, []), (stops.STOPPED, [signal.SIGUSR2])):
            with pytest.raises(SystemExit):
                leave_when_asked(status)
            assert received == expected and stops.reason() is None
        os.kill(os.getpid(), signal.SIGUSR2)
        assert received == [signal.SIGUSR2] * 2, "the handler before is back"
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_nothing_is_started_after_a_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stops.listening() as listener:
        listener.ask("SIGTERM")
        with pytest.raises(SystemExit) as left:
            run(note_place, two(tmp_path), "never")
    assert left.value.code == stops.STOPPED
    assert capsys.readouterr().out == "stopped by SIGTERM before the first step: the same command again goes on.\n"
    assert list(tmp_path.iterdir()) == []


def test_time_is_a_request_of_its_own() -> None:
    with stops.listening():
        assert stops.reason(max_hours=1.0) is None
        assert stops.reason(max_hours=1e-9) == stops.reason() == "trainer.max_hours=1e-09"


def test_a_number_of_processes_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    program = "from pathlib import Path\nfrom gpipe.launch.processes import run\nfrom tests.test_launch import *\n"
    program += f"run(note_place, two(Path({str(tmp_path)!r})), 'never')"
    variables = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}
    environment = os.environ | variables | PYTHONPATH
    done = subprocess.run([sys.executable, "-c", program], check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: 3 processes were started, expected 2 (launch.num_replicas=1 x 2 for the stages)"
    )


def test_replicas_in_one_process_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(note_place, two(tmp_path, num_processes=1, num_replicas=2), "never")
    assert "error: launch.num_replicas is 2 in one process, expected 1" in capfd.readouterr().err


def test_a_gpu_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        run(note_place, two(tmp_path, num_processes=1, device="cuda"), "never")
    assert "error: launch.device is cuda, but torch finds no GPU here" in capfd.readouterr().err


def test_the_second_process_that_fails_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for cause in ("the first cause", "a consequence"):
        with pytest.raises(SystemExit), one_message(tmp_path):
            raise ValueError(cause)
    said = capsys.readouterr().err
    assert "the first cause" in said
    assert "a consequence" not in said


def test_of_processes_that_have_no_folder_yet_the_first_one_to_fail_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in ("1", "0"):
        (tmp_path / rank).mkdir()
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / rank / "error.json"))
        with pytest.raises(SystemExit), one_message():
            raise ValueError(f"cause in {rank}")
    assert capsys.readouterr().err == "error: cause in 1\n"


@pytest.mark.reliability
def test_a_process_that_fails_before_it_joined_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    num_cores = len(os.sched_getaffinity(0))  # so that nothing is left for the second process
    with pytest.raises(SystemExit):
        run(note_place, two(tmp_path, pin_cores=True, num_threads=num_cores), "never")
    said = capfd.readouterr().err
    assert said.startswith(f"error: launch.pin_cores is true, but process 1 of this host finds 0 of {num_cores} cores")
    assert "Traceback" in (tmp_path / "error.txt").read_text()


def test_an_error_of_an_earlier_try_silences_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "error.txt").write_text("error: the old one\n")
    with pytest.raises(SystemExit):
        run(fail_alone, two(tmp_path, num_processes=1))
    assert capsys.readouterr().err.startswith("error: the new one\n")
    assert (tmp_path / "error.txt").read_text().startswith("error: the new one\n")


def fail_alone(place: Place, folder: Path) -> None:
    raise ValueError("the new one")


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (
            "0",
            r"the processes \[1\] did not come within 0\.5 s: see what keeps them, or raise pipeline\.timeout_seconds",
        ),
        ("1", r"process 0 did not come within 0\.6 s: see what keeps it, or raise pipeline\.timeout_seconds"),
    ],
)
def test_a_short_time_out_bounds_the_wait_for_a_process_that_hangs_while_it_starts(
    monkeypatch: pytest.MonkeyPatch, rank: str, message: str
) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torch's agent has it
    variables = {
        "RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TimeoutError, match=message):
        processes._meet(0.5, time.monotonic())


@pytest.mark.parametrize("what", ["a value", "a connection"])
def test_a_short_time_out_bounds_the_wait_for_a_process_that_hangs_once_all_have_come(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    begun = time.monotonic()
    with pytest.raises(SystemExit):
        run(hang_before, two(tmp_path, timeout_seconds=1.0), what)
    assert time.monotonic() - begun < MANY_SECONDS / 2
    said = r"error: another process did not come in time \(wait timeout after \d+ms, .*\): see what keeps it, or raise"
    assert re.search(said, capfd.readouterr().err)


def test_new_processes_are_copies_of_one_that_has_loaded_what_they_need_and_ends_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = set()
    for variable in ("first", "second"):
        monkeypatch.setenv("VARIABLE", variable)
        run(note_origin, two(tmp_path, modules=("colorsys",)))
        first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
        assert first == second == {"parent": first["parent"], "loaded": True, "variable": variable}
        assert not is_running(first["parent"])
        servers.add(first["parent"])
    assert len(servers) == 2 and os.getpid() not in servers


LOADING_ONCE = """
import importlib
import torch

def refuse(*_, **__):
    raise AssertionError("a GPU is asked for")

for name in ("is_available", "device_count", "current_device", "get_device_capability", "get_device_properties"):
    setattr(torch.cuda, name, refuse)
from gpipe.run import LOADED_ONCE
for module in LOADED_ONCE:
    importlib.import_module(module)
assert not torch.cuda.is_initialized()
"""


def test_what_is_loaded_once_asks_for_no_gpu() -> None:
    command = [sys.executable, "-c", LOADING_ONCE]
    done = subprocess.run(command, env=os.environ | PYTHONPATH, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_processes_start_below_a_folder_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary := tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("VARIABLE", "")
    run(note_origin, two(tmp_path, modules=("colorsys",)))
    assert json.loads((tmp_path / "1.json").read_text())["parent"] == os.getpid()


def train_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    return subprocess.run(
        command, cwd=folder, env=os.environ | PYTHONPATH, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_typo_in_yaml_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "typo.yaml").write_text("# @package _global_\ntrainer:\n  num_epochs: [1\nseed: 3\n")
    done = train_in(tmp_path, "--config-dir", str(tmp_path), "+experiment=typo")
    place = f"{tmp_path / 'experiment' / 'typo.yaml'}, line 4"
    expected = f"error: {place}: expected ',' or ']', but got ':': correct it there, or in the line before.\n"
    assert (done.returncode, done.stderr) == (1, expected)


def test_a_place_where_no_folder_can_be_made_is_told_in_one_sentence() -> None:
    done = train_in(Path("/sys"))  # where root may not write either
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: no access to runs \(.*\): change its permissions, or start where you may write\.\n", done.stderr
    )


def test_an_error_of_a_launcher_is_told_in_one_sentence(tmp_path: Path) -> None:
    done = train_in(tmp_path, "-m", "hydra/launcher=slurm", "seed=1")
    assert (done.returncode, done.stderr) == (
        1,
        'error: RuntimeError: Could not detect "srun", are you indeed on a slurm cluster?\n',
    )


def test_of_a_log_in_a_message_the_last_line_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    dashes = "-" * 22
    with pytest.raises(SystemExit), one_message():
        raise ValueError(
            f"Job failed with trace:\n{dashes}\nTraceback:\n  File x\nKeyError: 3\n\n{dashes}\nSee job.err"
        )
    assert capsys.readouterr().err == "error: Job failed with trace:\nKeyError: 3\nSee job.err\n"


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), one_message(debug=True):
        raise ValueError("cause")
    assert "Traceback" in capsys.readouterr().err


def test_an_error_without_a_sentence_says_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), one_message():
        raise KeyError("width")
    assert capsys.readouterr().err == "error: KeyError: 'width'\n"


def wait_until(holds: object) -> None:
    deadline = time.monotonic() + MANY_SECONDS / 2
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
