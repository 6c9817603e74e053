"""What fails is said once, in one sentence, by whichever process it is."""

import errno
import os
import re
import resource
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpipe import PeerFailure
from gpipe.launch.errors import report_errors
from gpipe.launch.processes import Place, run
from tests.launch.launched import PYTHONPATH, note_place, two
from tests.support.program_server import run_program
from tests.support.train_program import TRAIN

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


def test_the_second_process_that_fails_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for cause in ("the first cause", "a consequence"):
        with pytest.raises(SystemExit), report_errors(tmp_path):
            raise ValueError(cause)
    said = capsys.readouterr().err
    assert "the first cause" in said
    assert "a consequence" not in said


def test_a_process_that_was_told_of_an_error_lets_the_one_that_told_report_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def report(error: Exception) -> None:
        with pytest.raises(SystemExit), report_errors(tmp_path):
            raise error

    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(report, PeerFailure("rank 0: PermissionError: elsewhere", told=True))
        with pytest.raises(TimeoutError):
            told.result(timeout=0.2)
        report(PermissionError(errno.EACCES, "Permission denied", "elsewhere"))
        told.result()
    said = capsys.readouterr().err
    assert said.startswith("error: no access to elsewhere (Permission denied)")
    assert "rank 0" not in said and "PeerFailure" not in (tmp_path / "error.txt").read_text()


def test_of_processes_that_have_no_folder_yet_the_first_one_to_fail_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in ("1", "0"):
        (tmp_path / rank).mkdir()
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / rank / "error.json"))
        with pytest.raises(SystemExit), report_errors():
            raise ValueError(f"cause in {rank}")
    assert capsys.readouterr().err == "error: cause in 1\n"


def test_where_no_traceback_can_be_written_the_first_process_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    for cause, shared in (("first", tmp_path), ("second", tmp_path), ("alone", folder)):  # alone, no mark can be left
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(shared / "0" / "error.json"))
        with pytest.raises(SystemExit), report_errors(folder):
            raise ValueError(cause)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said == ["error: first", "error: alone"]


def test_a_full_disk_gets_no_half_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(SystemExit), report_errors(tmp_path):
            raise ValueError("cause")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err.startswith("error: cause\n(the traceback could not be written: ")
    assert list(tmp_path.iterdir()) == []


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


def train_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program(TRAIN, *arguments, folder=folder)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--package", "trainer"], "--package changes what --cfg prints: add --cfg job, or leave --package out"),
        (
            ["--experimental-rerun=a"],
            "--experimental-rerun loads a pickle, which may run any code: start the run's command again",
        ),
        (["--resolve", "seed=1"], "--resolve fills in what --cfg prints: add --cfg job, or leave --resolve out"),
        (["--epochs=3"], "unrecognized arguments: --epochs=3: see --help"),
    ],
)
def test_a_wrong_option_is_told_in_one_sentence(tmp_path: Path, words: list[str], said: str) -> None:
    done = train_in(tmp_path, *words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {said}.\n")


NO_FILE = (
    "but neither conf/ nor the folder of --config-dir has a file {}.yaml: correct the name, or leave --config-name"
)
NO_PARENT = (
    "which this program does not have: correct its defaults list, or leave out what chose it, such as --config-name"
)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config-name", "trian"], f"--config-name is trian, {NO_FILE.format('trian')} out"),
        (["-cn", "trian.yaml", "-m", "seed=1,2"], f"--config-name is trian, {NO_FILE.format('trian')} out"),
        (["-cn", "predict"], f"predict.yaml inherits from predict_schema, {NO_PARENT}"),
        (
            ["-cp", "/nowhere"],
            "--config-path is /nowhere, which is not a folder: correct it, or leave --config-path out",
        ),
    ],
)
def test_a_wrong_name_of_the_main_file_is_told_in_one_sentence(tmp_path: Path, words: list[str], said: str) -> None:
    done = train_in(tmp_path, *words)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {said}.\n")


@pytest.mark.parametrize("option", ["--help", "--info=defaults", "--cfg=job"])
def test_whatever_is_shown_a_wrong_word_is_told_in_one_sentence(tmp_path: Path, option: str) -> None:
    done = train_in(tmp_path, option, "+experiment=amoebanet_imagnet")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "amoebanet_imagnet" in done.stderr
    assert "Traceback" not in done.stderr


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
    said = "error: hydra/launcher starts jobs of SLURM, but this machine has no srun: start train.py on a login node of"
    remedy = " the cluster, or set hydra/launcher=submitit_local to try it here.\n"
    assert (done.returncode, done.stderr) == (1, said + remedy)


def test_of_a_log_in_a_message_the_last_line_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    dashes = "-" * 22
    with pytest.raises(SystemExit), report_errors():
        raise ValueError(
            f"Job failed with trace:\n{dashes}\nTraceback:\n  File x\nKeyError: 3\n\n{dashes}\nSee job.err"
        )
    assert capsys.readouterr().err == "error: Job failed with trace:\nKeyError: 3\nSee job.err\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_file_for_which_there_is_no_room_is_named_with_the_remedy(
    capsys: pytest.CaptureFixture[str], number: int
) -> None:
    with pytest.raises(SystemExit), report_errors():
        raise OSError(number, os.strerror(number), "here/record.json")
    remedy = "make room there, or raise the limit, and start the same command again."
    assert capsys.readouterr().err == f"error: here/record.json cannot be written ({os.strerror(number)}): {remedy}\n"


def test_an_error_of_the_system_that_names_no_file_is_told_in_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), report_errors():
        raise OSError(errno.ENOSPC, "No space left on device")
    assert capsys.readouterr().err == "error: OSError: [Errno 28] No space left on device\n"


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), report_errors(debug=True):
        raise ValueError("cause")
    assert "Traceback" in capsys.readouterr().err


def test_a_search_whose_trials_others_run_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), report_errors():
        raise ValueError("No trials are completed yet.")
    said = capsys.readouterr().err
    assert said == "error: no trial of the search was completed: the outcome of each is above.\n"


def test_an_error_that_names_a_file_whose_name_is_no_utf8_is_kept(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), report_errors(tmp_path):
        raise ValueError("cannot decode caf\udce9.png: remove it")
    assert (tmp_path / "error.txt").read_text().startswith("error: cannot decode caf\\udce9.png: remove it\n")


def test_an_error_without_a_sentence_says_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), report_errors():
        raise KeyError("width")
    assert capsys.readouterr().err == "error: KeyError: 'width'\n"


def test_a_temporary_folder_whose_name_is_too_long_for_sockets_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / ("x" * 100)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(SystemExit), report_errors(), socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "listener"))
    assert capsys.readouterr().err == (
        f"error: {folder} is too long for the path of a folder of sockets: set TMPDIR to a shorter one.\n"
    )
