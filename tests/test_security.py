"""No configuration can name code to run: what the README's section on security promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose
from hydra.errors import HydraException

from gpipe.config import ConfigError
from gpipe.config.saved import from_plain
from tests.foreign_config import compose_with, write_config

ROOT = Path(__file__).parents[1]
# What a folder of configurations from elsewhere may try.
CODE = {
    "callback": "hydra: {callbacks: {mine: {_target_: os.system, command: touch sprung}}}",
    "method": "hydra: {callbacks: {mine: {_target_: gpipe.sweep.Path.touch, self: sprung}}}",
    "launcher": "hydra: {launcher: {_target_: torch.load}}",
    "sampler": "hydra: {sweeper: {sampler: {_target_: torch.hub.load}}}",
    "nested": "hydra: {sweeper: {params: {a: [{_target_: builtins.eval}]}}}",
    "interpolated": "hydra: {callbacks: {mine: {_target_: '${name}'}}}",
    "logging_factory": "hydra: {job_logging: {root: {}, formatters: {a: {'()': os.system, command: touch sprung}}}}",
    "logging_class": "hydra: {hydra_logging: {root: {}, handlers: {a: {class: logging.handlers.SMTPHandler}}}}",
    "logging_reference": "hydra: {job_logging: {root: {}, handlers: {a: {stream: 'ext://os.environ'}}}}",
    "environment": "hydra: {job: {env_set: {LD_PRELOAD: ./evil.so}}}",
    "shell_lines": "hydra: {launcher: {setup: [touch sprung]}}",
    "script_line": 'hydra: {launcher: {comment: "a\\ntouch sprung"}}',
    "function": "hydra: {sweeper: {custom_search_space: os.system}}",
    "model": "model: {_target_: os.system}",
}
_REFUSALS = {
    "environment": "env_set is LD_PRELOAD, expected nothing: no configuration may name code",
    "shell_lines": "setup is touch sprung, expected nothing",
    "script_line": "expected one line: it becomes a line of a job's script",
    "function": "custom_search_space is os.system, expected nothing",
    "model": "_target_",
}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch) -> Path:
    """The folder in which programs run, and where the configurations of somebody else lie."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize("kind", CODE)
def test_a_config_that_names_code_is_refused_before_anything_is_made_of_it(kind: str, elsewhere: Path) -> None:
    choices = {"launcher": "submitit_slurm"} if kind in ("shell_lines", "script_line") else {}
    choices |= {"sweeper": "optuna"} if kind in ("sampler", "function") else {}
    with pytest.raises(HydraException, match=_REFUSALS.get(kind, "expected none: no configuration may name code")):
        compose_with(elsewhere, CODE[kind], *(f"hydra/{group}={name}" for group, name in choices.items()))
    assert not (elsewhere / "sprung").exists()


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize(
    "choice",
    [
        "launcher=basic",
        "launcher=submitit_local",
        "launcher=slurm",
        "sweeper=basic",
        "sweeper=optuna",
        "job_logging=default",
    ],
)
def test_the_launchers_sweepers_and_logs_that_are_known_pass(choice: str) -> None:
    composed = compose("train", overrides=[f"hydra/{choice}"], return_hydra_config=True)
    assert composed.hydra.callbacks.sweep_end._target_ == "gpipe.sweep.SweepEnd"


def test_settings_that_were_saved_are_not_interpolated() -> None:
    with pytest.raises(ConfigError, match=r"have an interpolation, \$\{\.\.\.\}, expected values"):
        from_plain({"name": "${oc.env:HOME}"})


def environment_of(**values: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), **values}


def test_the_program_itself_runs_nothing_of_a_folder_of_configurations(elsewhere: Path) -> None:
    """What is refused is refused before Hydra's own start: its log, its callbacks, its launcher."""
    write_config(elsewhere, CODE["logging_factory"])
    command = [sys.executable, str(ROOT / "train.py"), "--config-dir", "conf", "+extra=evil"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=elsewhere, env=environment_of(), check=False)
    assert done.returncode == 1 and "no configuration may name code to run; remove it." in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in elsewhere.iterdir()] == ["conf"]
