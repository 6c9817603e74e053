"""Processes start together, from one that has loaded what they need, and end together."""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gpipe.launch import agent, devices, rendezvous
from gpipe.launch.processes import Place, run
from tests.launch.launched import MANY_SECONDS, PYTHONPATH, is_running, note_place, pids, two
from tests.support.program_server import TORCHRUN, run_program

pytestmark = pytest.mark.usefixtures("forked_server")


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


def hang_before(place: Place, folder: Path, what: str) -> None:
    if dist.get_rank() == 0:
        time.sleep(MANY_SECONDS)
    if what == "a value":
        place.share("word", "from the other")
    dist.new_group(timeout=timedelta(seconds=1))


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
    assert [devices.count_threads(None, num_processes) for num_processes in (1, 2, 3)] == [2, 1, 1]
    with pytest.raises(ValueError, match="process 2 of this host finds 0 of 1 cores left"):
        devices.pin(1, 2)


def test_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(devices.DevicesMissing, match=r"^this run needs 2 GPUs, 1 is here: set launch\.device=cpu"):
        devices.check_devices(2, "auto", None, False)
    devices.check_devices(1, "auto", None, False)
    devices.check_devices(2, "cpu", None, False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices.check_devices(2, "auto", None, False)


def test_replicas_are_rows_of_the_mesh(tmp_path: Path) -> None:
    run(note_place, two(tmp_path, num_stages=1, num_replicas=2), "there")
    assert (tmp_path / "1.txt").read_text().startswith("there [1, 0] False")


def test_torchruns_processes_are_adopted_and_share_the_first_ones_folder(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom pathlib import Path\nfrom gpipe.launch.processes import run\n"
        "from tests.launch.test_processes import note_place, two\n"
        f"folder = Path({str(tmp_path)!r}) / os.environ['RANK'].replace('0', '')\n"
        "run(note_place, two(folder, num_processes=1), 'there')\n"
    )
    done = run_program(TORCHRUN, "--standalone", "--nproc-per-node", "2", str(script))
    assert done.returncode == 0, done.stderr
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
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str, message: str
) -> None:
    monkeypatch.setattr(agent, "_REPORT_SECONDS", 1.0)
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


COLLECTING = """
import gc
from gpipe.launch import garbage_collection

garbage_collection.pause()
assert not gc.isenabled()
garbage_collection.resume()
kept = gc.get_freeze_count()
assert gc.isenabled() and kept > 1000
loaded_later = [[] for _ in range(100)]
garbage_collection.resume()
assert gc.get_freeze_count() == kept
"""


def test_only_what_was_loaded_while_garbage_collection_was_paused_is_never_searched(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COLLECTING]
    done = subprocess.run(command, env=os.environ | PYTHONPATH, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_number_of_processes_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path\nfrom gpipe.launch.processes import run\nfrom tests.launch.test_processes import *\n"
    )
    program += f"run(note_place, two(Path({str(tmp_path)!r})), 'never')"
    (script := tmp_path / "script.py").write_text(program)
    variables = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}
    done = run_program(script, **variables)
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


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (
            "0",
            r"the processes \[1\] did not join within 0\.5 s: find out what delays them, or raise pipeline\.timeout",
        ),
        ("1", r"process 0 did not join within 0\.6 s: find out what delays it, or raise pipeline\.timeout_seconds"),
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
        rendezvous.join_store(0.5)


@pytest.mark.parametrize("what", ["a value", "a connection"])
def test_a_short_time_out_bounds_the_wait_for_a_process_that_hangs_once_all_have_come(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    begun = time.monotonic()
    with pytest.raises(SystemExit):
        run(hang_before, two(tmp_path, timeout_seconds=4.0), what)  # in which all come, on a loaded machine too
    assert time.monotonic() - begun < MANY_SECONDS / 2
    said = (
        r"error: another process did not answer in time \(wait timeout after \d+ms, .*\): find out what delays it, or"
    )
    assert re.search(said, capfd.readouterr().err)
