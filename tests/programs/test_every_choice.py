"""Every value of every enumerated setting trains, with images and with sentences, or is refused in a line."""

import importlib
import json
import math
import pkgutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum, StrEnum
from functools import reduce
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hydra import compose

from gpipe import config
from gpipe.config import RunConfig, to_run
from gpipe.programs.train import launch_training
from gpipe.training import wandb_mirror

pytestmark = pytest.mark.usefixtures("composer")
SHORT = (
    "trainer.max_steps=2", "trainer.num_untimed_steps=1", "trainer.timeline_every_steps=null",
    "trainer.checkpoints.keep=null", "trainer.evaluation.max_batches=1", "schedule.warm_up_epochs=0",
    "schedule.warm_up_steps=1", "pipeline.num_stages=4", "pipeline.num_microbatches=4",
)  # fmt: skip
IMAGES = (
    "model.num_filters=8", "data.image_size=32", "trainer.batch_size=8", "trainer.evaluation.batch_size=8",
    "trainer.evaluation.statistics_batches=1",
)  # fmt: skip
SENTENCES = (
    "model=translation_t2_256_8", "data=multilingual_embedded", "data.languages=[gu]", "trainer.batch_size=256",
    "trainer.evaluation.batch_size=256",
)  # fmt: skip
FAMILIES = {"images": IMAGES, "sentences": SENTENCES}
# What cannot work where the tests run, and what is said of it.
REFUSED = {
    "launch.device=cuda": "launch.device is cuda",
    "tracking.mode=online": "tracking.mode is online",
}
# They are settings of plan.py alone, which trains nothing: see test_plan.py.
OF_PLANS = {"Find"}


@pytest.fixture(autouse=True)
def _bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU and without a key of Weights & Biases, wherever the tests run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(wandb_mirror, "has_key", lambda: False)


def choices_of(settings: Any, place: str = "") -> Iterator[tuple[str, type[Enum]]]:
    """Yield the key of each enumerated setting, and its values."""
    hints = get_type_hints(type(settings))
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            yield from choices_of(value, f"{place}{field.name}.")
        for kind in (hints[field.name], *get_args(hints[field.name])):
            if isinstance(kind, type) and issubclass(kind, Enum):
                yield f"{place}{field.name}", kind


def run_of(family: str, *overrides: str) -> RunConfig:
    return to_run(compose("train", overrides=[*SHORT, *FAMILIES[family], *overrides]))


def words_of_round(choices: dict[str, list[str]], number: int) -> list[str]:
    """Return a value of each setting; in as many rounds as a setting has values, each has its turn."""
    words = []
    for place, values in choices.items():
        turn = number + (place == "pipeline.partition_by")  # memory is not balanced over two stages per device
        words.append(f"{place}={values[turn % len(values)]}")
    shared = 2 if {"pipeline.schedule=interleaved_1f1b", "pipeline.schedule=zb_v"} & set(words) else 1
    return [*words, f"pipeline.stages_per_device={shared}"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_every_enumerated_setting_trains(family: str, tmp_path: Path) -> None:
    choices = {
        place: [value.value for value in kind if f"{place}={value.value}" not in REFUSED]
        for place, kind in choices_of(run_of(family))
    }
    for number in range(max(map(len, choices.values()))):
        words = words_of_round(choices, number)
        folder = tmp_path / str(number)
        folder.mkdir()
        launch_training(run_of(family, *words), folder, words)
        record = json.loads((folder / "record.json").read_text())
        assert record["results"]["num_steps"] == 2, words
        assert all(math.isfinite(figures["loss"]) for figures in record["results"]["evaluation"].values()), words
        for place, _, value in (word.partition("=") for word in words):
            found = reduce(dict.__getitem__, place.split("."), record["config"])
            assert value in (str(found), "auto"), f"{place} is {found}"  # what auto came to is recorded


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("word", REFUSED)
def test_a_value_that_cannot_work_here_is_refused(
    family: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        launch_training(run_of(family, word), tmp_path, [word])
    line, *_ = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {REFUSED[word]}")


def test_no_enumerated_setting_is_left_out() -> None:
    modules = [importlib.import_module(f"gpipe.config.{each.name}") for each in pkgutil.iter_modules(config.__path__)]
    declared = {
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Enum)
    }
    tried = {kind for family in FAMILIES for _, kind in choices_of(run_of(family))}
    assert {kind.__name__ for kind in declared - tried - {Enum, StrEnum}} == OF_PLANS
