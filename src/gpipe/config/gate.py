"""What no configuration may do: name code to run, read the environment, or repeat a secret.

Hydra makes objects of `_target_`s and of the logging's settings, sets environment variables, and writes what was
composed into files, all before train.py gets a word in. So what it composes is checked where it composes.
"""

from collections.abc import Iterator
from functools import wraps
from typing import Any, NoReturn

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

from gpipe.config.checks import ConfigError
from gpipe.environment_secrets import find_secret

_NAMES_CODE = ("_target_", "()", "class", "factory")  # the first is Hydra's, the others are logging's
_KNOWN_CODE = frozenset(
    {
        "gpipe.sweep.SweepEnd",
        "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
        "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
        "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
        "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper",
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher",
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
        *(f"optuna.samplers.{kind}Sampler" for kind in ("CmaEs", "Grid", "MOTPE", "NSGAII", "Random", "TPE")),
        *(f"logging.{kind}" for kind in ("FileHandler", "Formatter", "NullHandler", "StreamHandler")),
    }
)
_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
# What else runs code: variables such as LD_PRELOAD, lines of a shell, a function by its name.
_EMPTY = ("hydra.job.env_set", "hydra.launcher.setup", "hydra.launcher.srun_args", "hydra.sweeper.custom_search_space")

_compose = ConfigLoaderImpl.load_configuration


def guard_composition() -> None:
    """Let Hydra compose, from here on in this process, only what passes `refuse`; `${oc.env:...}` is an error."""
    ConfigLoaderImpl.load_configuration = _composed_and_checked  # type: ignore[method-assign]
    OmegaConf.register_new_resolver("oc.env", _refuse_environment, replace=True)


def refuse(composed: DictConfig) -> None:
    """Refuse a composed configuration that names code, or has a secret in it. Raises ConfigCompositionException."""
    for place in _EMPTY:
        if value := OmegaConf.select(composed, place):
            # Of variables their names alone: hydra.job.env_copy has put there what the environment says.
            shown = ", ".join(value) if OmegaConf.is_config(value) else value
            raise ConfigCompositionException(
                f"{place} is {shown}, expected nothing: no configuration may name code to run; do it in the shell that "
                "starts the program."
            )
    for place, key, value in _entries(OmegaConf.to_container(composed, resolve=False)):
        _refuse_secret(place, f"{key} {value}")
        if isinstance(value, str) and "${oc.env" in value:  # the resolver refuses what is not so plain to see
            raise ConfigCompositionException(_environment_is_read(value))
        names_code = key in _NAMES_CODE and value not in _KNOWN_CODE
        if names_code or (isinstance(value, str) and _is_reference(value)):
            raise ConfigCompositionException(
                f"{place} is {value}, expected none: no configuration may name code to run; remove it."
            )
        if place.startswith("hydra.launcher.") and "\n" in f"{key}{value}":
            raise ConfigCompositionException(
                f"{place} is {value!r}, expected one line: it becomes a line of a job's script; remove the line breaks."
            )


@wraps(_compose)
def _composed_and_checked(
    self: ConfigLoaderImpl, config_name: str | None, overrides: list[str], *args: Any, **settings: Any
) -> DictConfig:
    for override in overrides:  # before Hydra can complain of one and repeat it
        _refuse_secret(override.partition("=")[0] if "=" in override else "an override", override)
    composed = _compose(self, config_name, overrides, *args, **settings)
    refuse(composed)
    return composed


def _entries(node: Any, place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the place, the key and the value of everything in nested dicts and lists."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in pairs:
        inside = f"{place}.{key}" if place else str(key)
        yield inside, str(key), "" if isinstance(value, dict | list) and key not in _NAMES_CODE else value
        yield from _entries(value, inside)


def _is_reference(value: str) -> bool:
    return value.startswith(("ext://", "cfg://")) and value not in _STREAMS


def _refuse_secret(place: str, text: str) -> None:
    if (what := find_secret(text)) is not None:
        raise ConfigCompositionException(
            f"{'a setting' if find_secret(place) else place} has {what} in it, which would be written into the run's "
            "files: leave secrets in the environment, where the libraries that need them find them."
        )


def _refuse_environment(name: str = "", *_: Any) -> NoReturn:
    raise ConfigError(_environment_is_read(name))


def _environment_is_read(what: str) -> str:
    return (
        f"the settings read the environment by oc.env: {what}, expected the value itself, because settings are written "
        'into files: let the shell fill it in, as in data.root="$HOME/data".'
    )
