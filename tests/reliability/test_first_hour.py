"""The first hour of a stranger: what one types after the README, in a folder of one's own, on a busy machine."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from rich.text import Text

from gpipe.data import open_image_set
from tests.support.program_server import run_program
from tests.support.terminal import in_terminal

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "train.py"
COLUMNS = 80
# Half of the photographs' size and a quarter of the batch-norm statistics, so that the walk takes minutes.
SMALLER = ("data.image_size=32", "trainer.evaluation.statistics_batches=2")
LAPTOP = ("+experiment=amoebanet_imagenet_laptop", *SMALLER, "launch.device=cpu")
SHORT = ("trainer.max_steps=1", "trainer.evaluation.max_batches=1")
BUSY = "while True: pass"
pytestmark = [pytest.mark.reliability, pytest.mark.xdist_group("first hour")]  # one busy core, not one for each worker


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder of the stranger's own; other workers keep the cores busy, or else a program does."""
    busy = None if "PYTEST_XDIST_WORKER" in os.environ else subprocess.Popen([sys.executable, "-c", BUSY])
    yield tmp_path_factory.mktemp("home")
    if busy is not None:
        busy.kill()
        busy.wait()


def run(home: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program(ROOT / program, *arguments, folder=home)


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one line of an error."""
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line


def screen(written: str) -> list[str]:
    """Return the lines that were ever shown, without colours and movements of the cursor."""
    text = re.sub(r"\x1b\[\?25[lh]|\x1b\[\d*[A-GJK]", "", written)
    return [Text.from_ansi(line).plain.rstrip() for line in re.split(r"[\r\n]+", text)]


def newest_run(home: Path, name: str = "amoebanet_imagenet_laptop") -> Path:
    return max((home / "runs" / name).iterdir())


def test_a_training_is_stopped_resumed_evaluated_and_used(home: Path) -> None:
    stop_a_training(home)
    resume_it(home)
    evaluate_and_predict(home)


def stop_a_training(home: Path) -> None:
    """Press Ctrl-C; the terminal of 80 columns showed the step and the time left."""
    asked = False

    def stop_at_step_10(text: str, pid: int) -> None:
        nonlocal asked
        if not asked and re.search(r"1\d/40", text):
            asked = True
            os.kill(pid, signal.SIGINT)  # Ctrl-C

    status, written = in_terminal(TRAIN, *LAPTOP, "trainer.max_steps=40", folder=home, on_text=stop_at_step_10)
    assert status == 75, screen(written)[-5:]
    bars = [line for line in screen(written) if re.search(r"\d+/40\b", line)]
    assert bars and all(len(line) <= COLUMNS for line in bars)
    assert any(re.search(r"\d+/40 .*\d:\d\d:\d\d", line) for line in bars), bars[-3:]
    assert list((newest_run(home) / "checkpoints").glob("step-*"))


def resume_it(home: Path) -> None:
    """Type the same command, which goes on and tells what was reached."""
    folder = newest_run(home)
    done = run(home, "train.py", *LAPTOP, "trainer.max_steps=40")
    assert done.returncode == 0, done.stderr
    assert "resuming after step 1" in done.stdout + done.stderr
    assert newest_run(home) == folder, "it goes on in its folder"
    assert "without averaging the weights" in done.stdout
    evaluation = json.loads((folder / "record.json").read_text())["results"]["evaluation"]["test"]
    assert evaluation["top1"] > 0.3, "forty steps are enough to see that it learns"


def evaluate_and_predict(home: Path) -> None:
    """Evaluate what was trained, and let it classify a folder."""
    record = json.loads((newest_run(home) / "record.json").read_text())
    name = "runs/amoebanet_imagenet_laptop"
    done = run(home, "train.py", f"evaluate={name}", "launch.device=cpu")
    assert f"top1 {record['results']['top1']:.4f}" in done.stdout, done.stderr
    photographs = home / "photographs"
    photographs.mkdir()
    for index in range(5):
        open_image_set("fashion_mnist_embedded", "test", None).image(index).save(photographs / f"{index}.png")
    done = run(home, "predict.py", f"checkpoint={name}", "images=photographs", "grid=grid.png", "device=cpu")
    assert len(done.stdout.splitlines()) == 5, done.stderr
    with Image.open(home / "grid.png") as grid:
        assert grid.width > 500


def test_sixteen_steps_are_judged_by_the_weights_that_they_reached(home: Path) -> None:
    done = run(home, "train.py", *LAPTOP, "trainer.max_steps=16", "name=short")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (newest_run(home, "short") / "metrics.jsonl").read_text().splitlines()]
    (evaluation,) = [line for line in lines if "test/top1" in line]
    chance = 0.1
    assert evaluation["test/top1"] > 2 * chance and evaluation["test/raw_top1"] > 2 * chance


@pytest.mark.parametrize("name", ["one_step", "overfit", "profile"])
def test_a_run_is_debugged(home: Path, name: str) -> None:
    short = ["trainer.batch_size=32", "trainer.max_steps=50"] if name == "overfit" else []
    done = run(home, "train.py", *LAPTOP, f"debug={name}", f"name={name}", "tracking=disabled", *short)
    assert done.returncode == 0, done.stderr
    folder = newest_run(home, name)
    assert not (folder / "checkpoints").exists()
    assert len([*folder.glob("profile_*.json")]) == (2 if name == "profile" else 0)
    if name == "overfit":
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["top1"] for line in lines if "top1" in line][-1] == 1.0


def test_a_study_prints_its_table_and_leaves_the_pages_alone(home: Path) -> None:
    before = {path: path.read_bytes() for path in (ROOT / "reproductions").rglob("*.*") if path.suffix != ".pyc"}
    done = run_program("experiments.one_stage_overhead", "--rounds", "1", folder=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("|") > 10
    after = {path: path.read_bytes() for path in (ROOT / "reproductions").rglob("*.*") if path.suffix != ".pyc"}
    assert after == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("evaluate=runs/nothing",), "evaluate is runs/nothing"),
        (("predict.py", "checkpoint=runs/amoebanet_imagenet_laptop", "images=nothing"), "images is nothing"),
        (("model.num_filters=0",), "model.num_filters is 0"),
    ],
    ids=str,
)
def test_a_wrong_value_is_answered_in_a_sentence(home: Path, arguments: tuple[str, ...], said: str) -> None:
    program = arguments[0] if arguments[0].endswith(".py") else "train.py"
    done = run(home, program, *(word for word in arguments if word != program))
    assert said in error_of(done)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("trainer.max_step=3", "trainer.max_step is unknown, expected one of autocast, batch_size, "),
        ("debug=nothing", "debug=nothing is unknown, expected one of one_step, overfit, profile: correct its name.\n"),
        ("+experiment=nothing", "experiment=nothing is unknown, expected one of amoebanet_"),
        ("+experiment=nothing", ", amoebanet_imagenet_laptop, "),
    ],
)
def test_a_wrong_name_is_answered_with_what_there_is(home: Path, word: str, said: str) -> None:
    done = run(home, "train.py", word)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and said in done.stderr and "Traceback" not in done.stderr


def test_a_sweep_ends_with_a_table_that_the_terminal_has_room_for(home: Path) -> None:
    words = (*LAPTOP, *SHORT, "seed=0,1", "name=seeds")
    status, written = in_terminal(TRAIN, "-m", *words, folder=home)
    assert status == 0, screen(written)[-5:]
    table = [line for line in screen(written) if line.startswith("|")]
    assert len(table) == 4 and all(len(line) <= COLUMNS for line in table)
    assert any("(mean and deviation over 2 seeds)" in line for line in screen(written))
    job = table[-1].strip("| ").rpartition(" ")[2]
    done = run(home, "train.py", f"evaluate={next(home.glob('runs/sweep-*'))}/{job}", "launch.device=cpu")
    assert done.returncode == 0 and "top1" in done.stdout, done.stderr


def test_a_data_file_of_ones_own_is_used_and_stays_in_the_command(home: Path) -> None:
    (home / "my_conf" / "data").mkdir(parents=True)
    own = "defaults: [fashion_mnist_embedded, _self_]\nimage_size: 32\ncutout: 0.25\n"
    (home / "my_conf" / "data" / "cut.yaml").write_text(own)
    words = ("--config-dir", "my_conf", LAPTOP[0], "launch.device=cpu", "data=cut", "name=cut", *SHORT)
    done = run(home, "train.py", *words)
    assert done.returncode == 0, done.stderr
    record = json.loads((newest_run(home, "cut") / "record.json").read_text())
    assert record["config"]["data"]["cutout"] == 0.25
    assert record["command"] == f"python train.py {' '.join(words)}"


def test_what_is_compiled_is_shown_and_not_taken_for_a_hang(home: Path) -> None:
    words = ("+experiment=table2_transformer_lm_laptop", "model.num_layers=1", "trainer.compile=true", "name=compiled")
    short = ("trainer.max_steps=1", "trainer.num_untimed_steps=0", "pipeline.timeout_seconds=10")
    status, written = in_terminal(TRAIN, *words, *short, folder=home)
    assert status == 0, screen(written)[-5:]
    assert any(re.search(r"compiling layer \d of 3", line) for line in screen(written)), screen(written)


def test_tensorboard_has_the_figures_of_a_run(home: Path) -> None:
    done = run(home, "train.py", *LAPTOP, *SHORT, "tracking=tensorboard", "name=board")
    assert done.returncode == 0, done.stderr
    (events,) = newest_run(home, "board").rglob("events.out.tfevents.*")
    assert b"test/top1" in events.read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*LAPTOP, "tracking=online"), "wandb login"),
        ((*LAPTOP, "data.root=/photographs"), "data.root is /photographs, but data.name is fashion_mnist_embedded"),
        ((*LAPTOP, "data.num_classes=5"), "data.num_classes is 5, but fashion_mnist_embedded has 10: set"),
        ((*LAPTOP, "hydra/launcher=submitit_local"), "starts the jobs of a sweep"),
        (("-m", *LAPTOP, "seed=0,1", "hydra/launcher=slurm"), "this machine has no srun"),
        ((*LAPTOP, "hydra.run.dir=/"), "hydra.run.dir"),
        ((*LAPTOP, f"name={'x' * 300}"), "expected at most 100 letters"),
        (("--config-dir", "bad", "+extra=tabs"), "tabs.yaml"),
        (("--config-dir", "bad", "+extra=bomb"), "stands for more than 10,000 values"),
        (("--config-dir", "bad", "+extra=doublings"), "whose interpolations stand for too many values"),
        (("--config-dir", "bad", "+extra=circle"), "perhaps in a circle"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, tuple) else "",
)
def test_what_a_run_cannot_do_is_said_in_a_sentence_before_it_is_built(
    home: Path, words: tuple[str, ...], said: str
) -> None:
    extra = home / "bad" / "extra"
    extra.mkdir(parents=True, exist_ok=True)
    (extra / "tabs.yaml").write_text("seed:\n\t1\n")
    (extra / "bomb.yaml").write_text(
        "\n".join(["a0: &a0 [1]", *(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]" for n in range(30))])
    )
    names = [f"    p{n + 1}: ${{hydra.sweeper.params.p{n}}}${{hydra.sweeper.params.p{n}}}" for n in range(30)]
    (extra / "doublings.yaml").write_text(
        "\n".join(["# @package _global_", "hydra:", "  sweeper:", "   params:", "    p0: x", *names])
    )
    (extra / "circle.yaml").write_text("defaults: [circle]\n")
    done = run_program(TRAIN, *words, folder=home, WANDB_API_KEY="", HOME=str(home))
    assert said in error_of(done)
    assert "stages" not in done.stdout, "it was not built"
