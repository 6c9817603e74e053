"""The settings of an earlier run, read back from what it saved."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpipe.config.checks import ConfigError, Section
from gpipe.config.run import RunConfig


def from_plain(plain: Mapping[str, Any]) -> RunConfig:
    """Turn the output of `to_plain` back into a run's settings; other keys are ignored.

    A setting that is newer than the run is null if null is allowed.

    Raises:
        ConfigError: these are not the settings of a run that this program knows.
    """
    try:
        own = {field.name: plain[field.name] for field in fields(RunConfig) if field.name in plain}
        if "${" in json.dumps(own):
            raise ConfigError(
                "the settings that were saved have an interpolation, ${...}, expected values: do not use them."
            )
        run = OmegaConf.to_object(_complete(RunConfig, own))  # checks all types
    except ConfigError:
        raise
    except (TypeError, ValueError, OmegaConfBaseException) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"the settings that were saved are not those of a run that this program knows ({type(error).__name__}: "
            f"{reason}): use the version of the program that saved them."
        ) from None
    assert isinstance(run, RunConfig)
    return run


def _complete(base: type[Section], plain: Mapping[str, Any]) -> DictConfig:
    """Return a section as settings of the kind that has its keys, with null for each missing one that may be null."""
    kinds = [kind for kind in base.kinds() if _names(kind) - _nullable(kind) <= set(plain) <= _names(kind)]
    if not kinds:
        nearest = min(base.kinds(), key=lambda kind: len(_names(kind) ^ set(plain)))
        faults = [f"lacks {name}" for name in sorted(_names(nearest) - _nullable(nearest) - set(plain))]
        faults += [f"has the unknown {name}" for name in sorted(set(plain) - _names(nearest))]
        raise TypeError(f"{base.__name__} {', '.join(faults)}")
    kind = min(kinds, key=lambda kind: len(_names(kind)))  # a kind with more settings is meant only if it has them
    hints = get_type_hints(kind)
    known = {**dict.fromkeys(_nullable(kind)), **plain}
    section: DictConfig = OmegaConf.structured(kind)
    for name, value in known.items():
        section[name] = _complete(hints[name], value) if is_dataclass(hints[name]) else value
    return section


def _names(kind: type[Section]) -> set[str]:
    return {field.name for field in fields(kind)}


def _nullable(kind: type[Section]) -> set[str]:
    """Return the names of the settings that may be null."""
    return {name for name, hint in get_type_hints(kind).items() if NoneType in get_args(hint)}
