"""`make gpu`: its steps, their order and limits, and what becomes of one that fails. The rehearsal runs them."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose

from experiments.gpu.progress import LOG_FILE, Progress
from experiments.gpu.steps import Step, list_steps
from gpipe.config import to_run
from tests.support.program_server import run_program

ROOT = Path(__file__).parents[2]
HALF_AN_HOUR = 30
WRITE = "import sys; open('{steps}/order', 'a').write(sys.argv[1])"


def step(name: str, program: str) -> Step:
    return Step(name, ("-c", program, name), minutes=1)


def run(folder: Path, *steps: Step) -> dict[str, str | None]:
    return {one.name: end.failure for one, end in Progress(folder, ROOT).run(steps)}


def test_one_gpu_needs_half_an_hour_at_most() -> None:
    assert sum(one.minutes for one in list_steps(small=False) if one.num_gpus == 1) <= HALF_AN_HOUR


def test_the_rehearsal_has_all_steps() -> None:
    real, small = (list_steps(small=small) for small in (False, True))
    assert [replace(one, words=(), minutes=0) for one in small] == [replace(one, words=(), minutes=0) for one in real]


def test_a_step_that_fails_does_not_stop_the_others_and_runs_again(tmp_path: Path) -> None:
    tmp_path.joinpath("order").touch()
    steps = step("a", WRITE), step("b", f"{WRITE}; sys.exit(3)"), step("c", WRITE)
    assert run(tmp_path, *steps) == {"a": None, "b": "failed: exit status 3", "c": None}
    assert run(tmp_path, *steps)["b"] == "failed: exit status 3"
    assert tmp_path.joinpath("order").read_text() == "abcb"


def test_a_step_without_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    words = "sh", "-c", "sleep 100 & echo $!; wait"  # on a busy machine Python may need two seconds to start
    assert run(tmp_path, Step("a", words, minutes=2 / 60, is_python=False)) == {
        "a": "failed: it took longer than 0.0333333 minutes and was ended"
    }
    pid = int(tmp_path.joinpath("a", LOG_FILE).read_text())
    deadline = time.monotonic() + 30  # it was sent a signal, and a busy machine takes its time to deliver one
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("option", [[], ["--small"]])
def test_without_a_gpu_one_sentence_says_so(option: list[str], tmp_path: Path) -> None:
    words = [*option, "--pages", str(tmp_path), "--folder", str(tmp_path / "steps")]
    done = run_program("experiments.gpu", *words, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and done.stdout == "" and not (tmp_path / "steps").exists()
    assert done.stderr == ("not run: torch finds no GPU here; make gpu tests and measures on a machine that has one.\n")


def test_tiny_models_do_not_get_onto_the_pages() -> None:
    done = run_program("experiments.gpu", "--small")
    assert done.returncode == 2 and "--small needs --pages FOLDER" in done.stderr


@pytest.mark.parametrize("sweep", [one for one in list_steps(small=False) if one.sweep], ids=lambda one: one.name)
def test_a_sweep_has_valid_settings(sweep: Step, composer: None) -> None:
    overrides = [word.partition(",")[0] for word in sweep.words[2:] if not word.startswith("hydra.")]
    run = to_run(compose("train", overrides=overrides))
    assert run.name == sweep.sweep and run.launch.num_processes == 2
