"""The settings of an evaluation: those of the training, with the data that the command line chooses."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from gpipe.config.checks import ConfigError
from gpipe.config.run import RunConfig
from gpipe.config.saved import from_plain

_AS_TRAINED = (
    "image_size", "channels", "center_crop", "keep_aspect", "interpolation", "mean", "std",
    "tokenizer", "vocabulary_size", "max_tokens",
)  # fmt: skip
"""What the model expects of its examples, whatever the data set."""
_SAYABLE = ("data", "pipeline", "launch", "trainer.evaluation")
_OTHERS = ("evaluate", "hydra", "tracking")


def to_evaluated(composed: DictConfig, saved: Mapping[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Return the settings with which a trained model is evaluated.

    Args:
        composed: what Hydra composed. `launch` is taken from here: an evaluation needs fewer processes than a training.
        saved: the settings of the run that trained the model, from its checkpoint.
        overrides: the words of the command line. Only what they set replaces saved settings of data, pipeline and
            trainer.evaluation.

    Raises:
        ConfigError: the command line changes the model or how it was trained; the data has other classes, images with
            another kind of labels, or examples of the training.
    """
    plain: dict[str, Any] = copy.deepcopy(dict(saved))
    plain["launch"] = _plain(composed, "launch")
    for word, key in find_said_keys(overrides):
        section = next((name for name in _SAYABLE if key == name or key.startswith(f"{name}.")), None)
        if section is None:
            if key.partition(".")[0] in _OTHERS:
                continue
            raise ConfigError(
                f"{word} is given with evaluate, expected only settings of {', '.join(_SAYABLE)}: leave it out; the "
                "model and its training come from the checkpoint."
            )
        if key == "data":
            given = {name: plain["data"][name] for name in _AS_TRAINED if name in plain["data"]}
            chosen = _plain(composed, "data")
            plain["data"] = {name: given.get(name, value) for name, value in chosen.items()}
            if chosen.get("num_classes", 0) is None:  # compared once the data is open
                plain["data"]["num_classes"] = saved["data"].get("num_classes")
            if chosen.get("several_labels", 0) is None:  # likewise
                plain["data"]["several_labels"] = bool(saved["data"].get("several_labels"))
        else:
            *sections, name = key.split(".")
            reduce(getitem, sections, plain)[name] = _plain(composed, key)
    run = from_plain(plain)
    found, trained = (data.get("num_classes") for data in (plain["data"], saved["data"]))
    if found != trained:
        raise ConfigError(
            f"data.name is {run.data.name}, which has {found} classes, but the model has {trained}: choose a data set "
            "with the model's classes."
        )
    has_several, predicts_several = (bool(data.get("several_labels")) for data in (plain["data"], saved["data"]))
    if has_several != predicts_several:
        raise ConfigError(
            f"data.name is {run.data.name}, whose images have {describe_kind(has_several)}, but the model predicts "
            f"{describe_kind(predicts_several)}: choose a data set of that kind."
        )
    _refuse_trained_on(plain["data"], saved["data"])
    return run


def _refuse_trained_on(data: Mapping[str, Any], trained: Mapping[str, Any]) -> None:
    """Refuse to hold out more of the training's data than the training did: the first of it are those held out then."""
    if any(data.get(name) != trained.get(name) for name in ("name", "root")):
        return
    for name in ("validation_images", "validation_share"):
        held_out, before = data.get(name), trained.get(name)
        if (held_out or 0) > (before or 0):
            raise ConfigError(
                f"data.{name} is {held_out}, but {before or 'null'} in the training, which has seen some of those "
                "examples: leave it out."
            )


def find_said_keys(overrides: Sequence[str]) -> list[tuple[str, str]]:
    """Return each word of the command line with the key that it sets, or with each key in its dict."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [(str(part.input_line), key) for part in parsed for key in _find_keys(part.key_or_group, part.value())]


def _find_keys(key: str, value: Any) -> Iterator[str]:
    """Yield the key of a value, or the keys in it if it is a dict."""
    if not isinstance(value, dict):
        yield key
        return
    for name, inside in value.items():
        yield from _find_keys(f"{key}.{name}", inside)


def describe_kind(has_several_labels: bool) -> str:
    """Return how many labels an image has, in words."""
    return "several labels each" if has_several_labels else "one label each"


def _plain(composed: DictConfig, key: str) -> Any:
    """Return a section or a value as JSON has it."""
    value = OmegaConf.select(composed, key)
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True, enum_to_str=True)
    return getattr(value, "name", value)
