"""The settings of debug= count in every experiment, and the command line counts more."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from omegaconf import OmegaConf

from gpipe.config import to_run

CONF = Path(__file__).parents[2] / "conf"
DEBUG = sorted(path.stem for path in (CONF / "debug").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
pytestmark = pytest.mark.usefixtures("composer")


def said(plain: Any, keys: Any) -> Any:
    """Return of a value what another one has keys for."""
    return {key: said(plain[key], value) for key, value in keys.items()} if isinstance(keys, dict) else plain


def assert_in_force(name: str, experiment: str) -> None:
    values = OmegaConf.to_container(OmegaConf.load(CONF / "debug" / f"{name}.yaml"))
    composed = compose("train", overrides=[f"debug={name}", f"+experiment={experiment}", "init_from=null"])
    assert said(OmegaConf.to_container(composed, resolve=False), values) == values
    to_run(composed)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_its_values_fit_and_count_whatever_the_experiment_says(experiment: str) -> None:
    """Another file with each experiment."""
    assert_in_force(DEBUG[EXPERIMENTS.index(experiment) % len(DEBUG)], experiment)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEBUG)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_values_of_every_file_fit_and_count_whatever_the_experiment_says(name: str, experiment: str) -> None:
    assert_in_force(name, experiment)


@pytest.mark.parametrize("name", DEBUG)
def test_the_command_line_counts_more(name: str) -> None:
    composed = compose("train", overrides=["+experiment=transfer_laptop", f"debug={name}", "trainer.max_steps=7"])
    assert composed.trainer.max_steps == 7
