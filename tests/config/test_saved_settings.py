"""The settings of a finished run, read back, are those that it had."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose

from gpipe.config import ConfigError, to_plain, to_run
from gpipe.config.saved import from_plain
from gpipe.records import read_records

CONF = Path(__file__).parents[2] / "conf"
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
OPTIMIZERS = sorted(path.stem for path in (CONF / "optimizer").glob("*.yaml"))
pytestmark = pytest.mark.usefixtures("composer")


def data_for(model: str) -> list[str]:
    if model.startswith("translation"):
        return ["data=multilingual_embedded"]
    return ["data=random_tokens"] if model.startswith("transformer") else []


@pytest.mark.parametrize(
    "overrides",
    [[f"model={name}", *data_for(name)] for name in MODELS]
    + [[f"optimizer={name}", "pipeline.rematerialize=never"] for name in OPTIMIZERS],
    ids=" ".join,
)
def test_settings_come_back_as_they_were(overrides: list[str]) -> None:
    run = to_run(compose("train", overrides=overrides))
    saved = json.loads(json.dumps(to_plain(run) | {"tokenizer_sha256": "0" * 64}))
    assert from_plain(saved) == run


def test_settings_that_do_nothing_come_back_of_a_run_that_had_them() -> None:
    saved = to_plain(to_run(compose("train", overrides=[])))
    saved["trainer"]["evaluation"] |= {"patience": 1, "every_epochs": None, "every_steps": None}
    saved["model"] |= {"auxiliary_head": True, "auxiliary_weight": 0.0}
    found = from_plain(saved)
    assert found.trainer.evaluation.patience == 1 and found.model.family == "amoebanet"


@pytest.mark.parametrize(
    ("section", "change", "said"),
    [
        ("model", {"colour": "red"}, "ModelConfig has the unknown colour)"),
        ("trainer", {"evaluation": {"batch_size": 3}}, "EvaluationConfig lacks autocast)"),
        ("trainer", "none", "TrainerConfig lacks "),
        ("pipeline", {"rematerialize": "sometimes"}, "Invalid value 'sometimes'"),
        ("seed", 1.5, "'1.5' of type 'float'"),
        ("init_from", ["a"], "list"),
        ("name", None, "field 'name' is not Optional"),
    ],
)
def test_settings_of_another_program_are_refused_in_a_sentence(section: str, change: Any, said: str) -> None:
    saved = to_plain(to_run(compose("train")))
    if isinstance(change, dict):
        saved[section] |= change
    else:
        saved[section] = change
    with pytest.raises(ConfigError) as raised:
        from_plain(saved)
    message = str(raised.value)
    assert said in message and "\n" not in message
    assert message.startswith("the settings that were saved are not those of a run that this program knows")


@pytest.mark.parametrize("value", ["two\nlines", "\n", ""])
def test_a_value_of_several_lines_is_told_in_one(value: str) -> None:
    saved = to_plain(to_run(compose("train")))
    saved["model"] |= {"family": value}
    said = re.escape(
        f"model.family is {value!r}, but the settings beside it are those of amoebanet: choose with model=..."
    )
    with pytest.raises(ConfigError, match=f"^{said}$"):
        from_plain(saved)


def test_a_run_that_was_saved_before_a_setting_existed_is_read() -> None:
    saved = to_plain(to_run(compose("train")))
    del saved["launch"]["gpus_per_node"], saved["trainer"]["deterministic"], saved["trainer"]["evaluation"]["raw"]
    run = from_plain(saved)
    assert run.launch.gpus_per_node is None and run.trainer.deterministic is None
    assert run.trainer.evaluation.raw is None


@pytest.mark.parametrize("claim", ["figure3_multilingual", "table4_imagenet_and_transfer", "table5_batch_size"])
def test_the_settings_of_trainings_that_were_published_are_read(claim: str) -> None:
    """A new setting may be null, so that runs from before it can be scored and evaluated: since 25 November 2026."""
    newest = {
        record.experiment: record.config
        for record in read_records(CONF.parent / "reproductions" / claim / "runs.jsonl")
        if record.kind == "measured" and record.date >= "2026-11-25" and "trainer" in record.config
    }
    assert newest
    for name, config in newest.items():
        assert to_plain(from_plain(config)).keys() <= config.keys(), name
