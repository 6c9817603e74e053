"""Every command that is printed runs as printed, in a copy of the repository.

`commands.py` finds the commands. Each is treated by the first row of TREATMENTS that matches it; a command that no row
matches fails. Programs run for real, some shortened by overrides. What differs from these runs in values alone is
composed and checked as the program does it. A program that computes for minutes answers --help, which must know the
options of the command. What needs another machine names the test that stands for it.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from gpipe.config import to_run
from tests.documentation.commands import IGNORED, ROOT, find_commands
from tests.support.program_server import run_program

COMMANDS = find_commands()
SHORT = (
    "launch.num_threads=1", "launch.device=cpu", "tracking=disabled",
    "trainer.evaluation.max_batches=1", "trainer.evaluation.statistics_batches=1",
)  # fmt: skip
QUICK = (*SHORT, "trainer.max_steps=2", "trainer.checkpoints.every_steps=1", "schedule.warm_up_epochs=0")
SMALL = ("data.image_size=32", "trainer.evaluation.batch_size=100")
UNSCORED = tuple(f"trainer.evaluation.{setting}=null" for setting in ("every_epochs", "every_steps", "patience"))
IMAGES, TRANSLATION = "amoebanet_imagenet_laptop", "transformer_multilingual_laptop"
TRAINED = {IMAGES: (*QUICK, *SMALL), TRANSLATION: (*QUICK, *UNSCORED)}
"""The experiments whose runs other commands read, and how they are shortened."""
RUNS = {
    "runs/<name>/<date>": IMAGES,
    "runs/transformer_multilingual_laptop/<date>": TRANSLATION,
    "runs/transformer_multilingual/<date>": TRANSLATION,
    "runs/sweep-<id>/*/checkpoints/best": TRANSLATION,
    "runs/sweep-*/*/checkpoints/best": TRANSLATION,
    "<the runs' folders>": TRANSLATION,
}
"""The run that stands for a folder that the reader fills in."""
BLANKS = {
    r"reproductions/<claim>": "reproductions/bubble",
    r"experiments\.<study>": "experiments.translation_parameters",
    r"file=(text|german)\.txt": "file=sentences.txt",
    r"<[^>]+>|\.\.\.$": "filled_in",
    r" \[--[^\]]*\]": "",
}
"""What stands for the other parts that the reader fills in, and for those that are optional."""

MODULE_RUNNER = "run_module.py"
"""A program of the clone that is `python -m`: what it imports beside gpipe comes from the clone."""
TIMM = "tests/programs/test_train_timm.py"
"""Trains, evaluates and exports models of timm."""

Treatment = Callable[["Clone", str], None]


class Clone:
    """A copy of the repository, in which commands run."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*IGNORED, ".*_cache", "*.egg-info"))
        self.folder = folder
        self._trained: dict[str, Path] = {}  # by experiment
        (folder / MODULE_RUNNER).write_text(
            "import runpy, sys\nrunpy.run_module(sys.argv.pop(1), None, '__main__', True)\n"
        )
        (folder / "sentences.txt").write_text("Guten Morgen!\n")
        for page, name in (("training.md", "mine"), ("sweeps.md", "mine_sweep")):
            own = re.search(r"```yaml\n(.*?)```", (ROOT / "docs" / page).read_text("utf-8"), re.DOTALL)
            assert own is not None
            (folder / "conf" / "experiment" / f"{name}.yaml").write_text(own[1])

    def run(self, command: str, *more: str) -> str:
        """Run a Python program as a command says, with more arguments, and return what it prints."""
        program, *arguments = [*shlex.split(self.fill_in(command))[1:], *more]
        if program == "-m":
            program = MODULE_RUNNER
        done = run_program(self.folder / program, *arguments, folder=self.folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def fill_in(self, command: str) -> str:
        """Return a command with what its reader fills in; what it reads is there afterwards."""
        for part, experiment in RUNS.items():
            if part in command:
                command = command.replace(part, str(self.train(experiment)))
        if f"init_from=runs/{IMAGES}" in command:
            self.train(IMAGES)
        return fill_blanks(command)

    def train(self, experiment: str) -> Path:
        """Train an experiment, once, for two steps; return the run's folder, relative to the clone."""
        if experiment not in self._trained:
            self.run(f"python train.py +experiment={experiment}", *TRAINED[experiment])
            (folder,) = (self.folder / "runs" / experiment).iterdir()
            self._trained[experiment] = folder.relative_to(self.folder)
        return self._trained[experiment]


def fill_blanks(command: str) -> str:
    """Return a command with a word for each blank."""
    for pattern, word in BLANKS.items():
        command = re.sub(pattern, word, command)
    return command


def runs(*more: str) -> Treatment:
    """Run the program, with more arguments."""

    def run(clone: Clone, command: str) -> None:
        clone.run(command, *more)

    return run


def trains(clone: Clone, command: str) -> None:
    """Train for two steps; other commands read the run."""
    assert (clone.folder / clone.train(command.partition("=")[2]) / "record.json").exists()


def is_composed(clone: Clone, command: str) -> None:
    """Compose the settings of a run, or of the first and the last job of a sweep, and check them as train.py does."""
    del clone
    arguments = shlex.split(fill_blanks(command).partition(".py")[2])
    given = [argument for argument in arguments if not argument.startswith("-")]
    if "-m" not in arguments:
        to_run(compose("train", overrides=given))
        return
    for job in dict.fromkeys(tuple(choose_job(given, which)) for which in (0, -1)):
        to_run(compose("train", overrides=list(job)))


def choose_job(overrides: list[str], which: int) -> list[str]:
    """Return the overrides of one job of a sweep: each swept setting has its first value (0) or its last one (-1)."""
    job = choose(overrides, which)
    given = {override.split("=")[0] for override in overrides}
    params = swept_settings(*job)
    swept = [f"{key}={value}" for key, value in params.items() if key not in given and "interval(" not in str(value)]
    return [*choose(swept, which), *job]


@cache
def swept_settings(*overrides: str) -> dict[str, Any]:
    """Return what a file says is swept, with its values."""
    composed = compose("train", overrides=list(overrides), return_hydra_config=True)
    params = OmegaConf.to_container(composed.hydra.sweeper.get("params") or OmegaConf.create(), resolve=False)
    assert isinstance(params, dict)
    return {str(key): value for key, value in params.items()}


def choose(overrides: list[str], which: int) -> list[str]:
    """Return overrides with one of the values of each that has several."""
    chosen = []
    for override in OverridesParser.create().parse_overrides(overrides):
        values = list(override.sweep_string_iterator()) if override.is_sweep_override() else []
        chosen.append(f"{override.get_key_element()}={values[which]}" if values else str(override.input_line))
    return chosen


def answers_help(clone: Clone, command: str) -> None:
    """Ask a program that computes for minutes for its help, and look there for the options that the command uses."""
    words = shlex.split(fill_blanks(command))
    program = words[: 3 if words[1] == "-m" else 2]
    text = clone.run(shlex.join(program), "--help")
    assert all(option in text for option in words[len(program) :] if option.startswith("--")), text


def is_made(clone: Clone, command: str) -> None:
    """Let make say what it would do."""
    make = command[command.index("make ") :].split()
    done = subprocess.run([*make, "-n"], cwd=clone.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def names_tests(clone: Clone, command: str) -> None:
    """Look for the tests that pytest is to run."""
    (path,) = [argument for argument in shlex.split(command) if argument.startswith("tests/")]
    assert list((clone.folder / path).rglob("test_*.py")) or (clone.folder / path).is_file()


def is_tested_by(test: str) -> Treatment:
    """Name the test that stands for a command; the settings of its train.py are composed here."""

    def check(clone: Clone, command: str) -> None:
        assert (ROOT / test).exists()
        if (program := re.search(r"train\.py [^']*", command)) is not None:
            is_composed(clone, f"python {program[0]}")

    return check


TREATMENTS: list[tuple[str, Treatment]] = [
    # What installs, or needs what is not here, and what stands for it.
    (
        r"\. \.venv/bin/activate|\.venv/bin/pre-commit install|apt-get .*|pip .*",
        is_tested_by("tests/test_environment.py"),
    ),
    (r"echo .* \| python translate\.py .*", is_tested_by("tests/programs/test_translate.py")),
    (r"python predict\.py .*", is_tested_by("tests/programs/test_predict.py")),
    (r"wandb sync( .*)?", is_tested_by("tests/training/test_tracking.py")),
    (r"python train\.py evaluate=(<run>|.* data=.*)", is_tested_by("tests/programs/test_evaluate.py")),
    (r".*runs/image_classification_laptop.*", is_tested_by(TIMM)),
    (r"python train\.py evaluate=.*", runs()),
    (r"(python|torchrun .*) examples/.*", is_tested_by("tests/documentation/test_examples.py")),
    (r"export GPIPE_JOB_SECRET=.*", is_tested_by("tests/launch/test_rendezvous.py")),
    (r"(salloc|srun) .*|torchrun .*", is_tested_by("tests/reliability/test_many_hosts.py")),
    (r"(\w+=\S+ )?make .*", is_made),
    (r".*python -m pytest .*", names_tests),
    # Runs: of these, those that others read, and one of each kind of command line.
    (rf"python train\.py \+experiment=({IMAGES}|{TRANSLATION})", trains),
    (r"python train\.py trainer\.max_steps=3", runs(*SHORT, *SMALL)),
    (r"python train\.py \+experiment=transfer_laptop data=digits init_from=.*", runs(*QUICK, *SMALL, *UNSCORED)),
    (r"python train\.py (-m )?\+experiment=mine(_sweep)?", runs("trainer.dry_run=true")),
    (r"python (train|plan)\.py (--help|--cfg job)", runs()),
    (r"python train\.py .* trainer\.dry_run=true", runs()),
    (r"python train\.py .* pipeline=auto", runs("trainer.dry_run=true")),
    (r"python plan\.py .* (find=|pipeline=auto ).*", is_tested_by("tests/programs/test_plan.py")),
    (r"python plan\.py .* model\.name=convnext_large .*", runs("model.name=convnext_atto")),
    (r"python plan\.py( .*)?", runs()),
    (r"python train\.py( .*)?", is_composed),
    # What reads the runs above.
    (r"python -m gpipe\.checkpoint .*", runs()),
    (r"python translate\.py .*", runs("beam=1", "device=cpu")),
    (r"python bleu\.py .*", runs("--languages", "de", "--limit", "2", "--beam", "1", "--device", "cpu")),
    (r"python -m reproductions faults .*", is_tested_by("tests/reproductions/test_faults.py")),
    (r"python -m reproductions( .*)?|python docs/pictures\.py", runs()),
    # Minutes of computing; tests/experiments and tests/notebooks run the other ones with small models.
    (r"python -m experiments\.one_stage_overhead", runs("--rounds", "1", "--record")),
    (r"python (-m experiments\.\S+|train_tokenizer\.py|notebooks/execute\.py)( .*)?", answers_help),
]
"""A pattern of commands, and how they are run; the first pattern that matches counts."""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """A copy of the repository for all commands, so that one reads what another one left; none writes to ours."""
    before = read_records()
    yield Clone(tmp_path_factory.mktemp("clone") / "gpipe")
    assert read_records() == before


def read_records() -> dict[Path, bytes]:
    """Return the records and pages that are committed."""
    return {path: path.read_bytes() for path in (ROOT / "reproductions").rglob("*.*") if path.suffix != ".pyc"}


@pytest.mark.slow
@pytest.mark.xdist_group("commands")  # one clone, in which one reads what another one left
@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize(
    "command", [pytest.param(command, id=f"{path}: {command}") for command, path in COMMANDS.items()]
)
def test_a_command_runs_as_printed(command: str, clone: Clone) -> None:
    treatment = next((treatment for pattern, treatment in TREATMENTS if re.fullmatch(pattern, command)), None)
    assert treatment is not None, "say in TREATMENTS how this command is run"
    treatment(clone, command)
