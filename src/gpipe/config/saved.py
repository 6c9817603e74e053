"""The settings of an earlier run, read back from what it saved."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpipe.config.checks import ConfigError
from gpipe.config.run import RunConfig


def from_plain(plain: Mapping[str, Any]) -> RunConfig:
    """Turn the output of `to_plain` back into a run's settings; other keys are ignored.

    A setting that is newer than the run is null if null is allowed.

    Raises:
        ConfigError: these are not the settings of a run that this program knows.
    """
    hints = get_type_hints(RunConfig)
    try:
        own = {field.name: plain[field.name] for field in fields(RunConfig) if field.name in plain}
        if "${" in json.dumps(own):
            raise ConfigError(
                "the settings that were saved have an interpolation, ${...}, expected values: do not use them."
            )
        known = {**dict.fromkeys(_nullable(RunConfig)), **plain}
        parts = {field.name: _part(hints[field.name], known[field.name]) for field in fields(RunConfig)}
        run = OmegaConf.to_object(OmegaConf.structured(RunConfig(**parts)))  # checks all types
        assert isinstance(run, RunConfig)
        return run
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, OmegaConfBaseException) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"the settings that were saved are not those of a run that this program knows ({type(error).__name__}: "
            f"{reason}): use the version of the program that saved them."
        ) from None


def _part(base: Any, value: Any) -> Any:
    """Return a section of the settings as its dataclass, or a plain value as it is."""
    if not is_dataclass(base):
        return value
    assert isinstance(base, type)
    kinds = [kind for kind in _family(base) if _names(kind) - _nullable(kind) <= set(value) <= _names(kind)]
    if not kinds:
        raise TypeError(f"no {base.__name__} has the keys {', '.join(sorted(value))}")
    kind = min(kinds, key=lambda kind: len(_names(kind)))  # a kind with more settings is meant only if it has them
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), _complete(kind, value)))


def _complete(kind: type, value: Mapping[str, Any]) -> dict[Any, Any]:
    """Return a section, and those in it, with null for each missing setting that may be null."""
    hints = get_type_hints(kind)
    parts = {
        name: _complete(hints[name], part) if is_dataclass(hints.get(name)) and isinstance(part, Mapping) else part
        for name, part in value.items()
    }
    return {**dict.fromkeys(_nullable(kind)), **parts}


def _names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def _nullable(kind: type) -> set[str]:
    """Return the names of the settings that may be null."""
    return {name for name, hint in get_type_hints(kind).items() if NoneType in get_args(hint)}


def _family(base: type) -> list[type]:
    children: list[type] = base.__subclasses__()
    return [base, *(kind for child in children for kind in _family(child))]
