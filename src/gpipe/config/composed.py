"""Compose the settings of an experiment without starting a run."""

import os
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from gpipe.config.checks import ConfigError
from gpipe.config.run import register_schemas, to_plain, to_run

CONF = Path(__file__).resolve().parents[3] / "conf"


def name_sources(composed: HydraConf, config_name: str = "train") -> list[str]:
    """Return the options with which another command finds the same files of settings, such as --config-dir.

    The program's own `config_name` needs no option.
    """
    words = []
    for source in composed.runtime.config_sources:
        if source.provider == "command-line":
            words += ["--config-dir", os.path.relpath(source.path)]
        elif source.provider == "main" and Path(source.path) != CONF:
            words += ["--config-path", source.path]
    if composed.job.config_name not in (None, config_name):
        words += ["--config-name", composed.job.config_name]
    return words + [word for word in composed.overrides.hydra if word.lstrip("+").startswith("hydra.searchpath=")]


def compose_plain(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings that overrides compose to, as JSON-able dicts; also works inside another Hydra program.

    Raises:
        ConfigError: a value is wrong, or a file is not in conf/.
    """
    return deepcopy(_compose_plain(tuple(overrides)))  # callers may change it


@cache
def _compose_plain(overrides: tuple[str, ...]) -> dict[str, Any]:
    register_schemas()
    around = GlobalHydra.instance().hydra  # that of a sweep, which renders pages when it ends
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return to_plain(to_run(compose("train", overrides=list(overrides))))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{' '.join(overrides)} does not compose: {str(error).splitlines()[0]}") from error
    finally:
        GlobalHydra.instance().hydra = around
