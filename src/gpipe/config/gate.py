"""Keep configurations from naming files or code to run, and from reading or repeating secrets.

Before train.py runs, Hydra creates folders and log files, instantiates `_target_`s and logging handlers, sets
environment variables, and writes the composed settings to files. So the settings are checked while Hydra composes them.
Of its own, only those that are known to be harmless pass. What the user sets on the command line is trusted.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpipe._compat.hydra import CachingConfigRepository, ConfigLoaderImpl, IConfigRepository
from gpipe.config.checks import ConfigError, add_remedy, why
from gpipe.config.endless_files import MAX_FILES, refuse_endless_interpolations, refuse_hostile_yaml
from gpipe.config.group_files import drop_replaced_values, explain_file
from gpipe.environment_secrets import find_secret, is_secret

_NAMES_CODE = ("_target_", "()", "class", "factory")  # the first is Hydra's, the others are logging's
_TEXT = r"(?s:.*)"  # of what is only shown, checked elsewhere, or overwritten by Hydra
_WORD = r"[\w.,:=+@*&|()\[\]-]*"
_NAME = r"(?!\.)[\w.,=+-]+"
_EXPERIMENT = r"[A-Za-z0-9][\w.-]{0,99}"
_FOLDER = r"\.|(runs|multirun)(/(?!\.{1,2}(/|$))[\w.,=+%-]+)*(/\.)?"  # torchrun's later processes have /.
_EXPECTED = {
    _WORD: "a word without blanks or slashes",
    _NAME: "letters, digits and _ . , = + -",
    _FOLDER: "a folder in runs/",
}
# Where a file may set Hydra's own settings, and to what besides null. It may set no others.
_HARMLESS = {
    r"(hydra_)?help\..*|job\.(override_dirname|config_name)|runtime\.(?!output_dir).*": _TEXT,
    r"mode|verbose(\.\d+)?|job\.(id|num)|job\.config\.override_dirname\.exclude_keys\.\d+": _WORD,
    r"job\.config\.override_dirname\.(kv|item)_sep": "[=,]",
    r"job\.chdir": "False",
    r"job\.name": _NAME,
    r"run\.dir|sweep\.dir|launcher\.submitit_folder": _FOLDER,
    r"sweep\.subdir": rf"{_NAME}|\$\{{hydra\.job\.num\}}",
    # Logs as Hydra has them: to the terminal, and to a file in the run's folder.
    r"(job|hydra)_logging\.(version|disable_existing_loggers|([\w.]+\.)?level)": _WORD,
    r"(job|hydra)_logging\.(root\.handlers\.\d+|handlers\.(console|file)\.formatter)": "console|file|simple",
    r"(job|hydra)_logging\.formatters\.simple\.format": r"[%\w()\[\] -]*",
    r"(job|hydra)_logging\.handlers\.console\.stream": r"ext://sys\.(stdout|stderr)",
    r"job_logging\.handlers\.file\.filename": r"\$\{hydra\.runtime\.output_dir\}/\$\{hydra\.job\.name\}\.log",
    r"launcher\.(account|array_parallelism|comment|constraint|cpus_per_(gpu|task)|exclude|gpus_per_(node|task)|gres"
    r"|max_num_timeout|mem_gb|mem_per_(cpu|gpu)|name|nodes|partition|qos|signal_delay_s|stderr_to_stdout"
    r"|tasks_per_node|timeout_min)": _WORD,
    r"sweeper\.(direction(\.\d+)?|max_batch_size|max_failure_rate|n_jobs|n_trials|study_name)": _WORD,
    r"sweeper\.sampler\.([a-z]\w*(\.[\w.]+)?|_partial_)": _WORD,
    # These become words of each job's command line, which may set what a file may not.
    r"sweeper\.(params|search_space)\.\+{0,2}(?!hydra\b|output\b|data\.cache\b)\w[\w./]*": _TEXT,
}
_HARMLESS_CODE = {
    r"(job|hydra)_logging\.handlers\.console\.class": r"logging\.StreamHandler",
    r"job_logging\.handlers\.file\.class": r"logging\.FileHandler",
    r"callbacks\.sweep_end\._target_": r"gpipe\.programs\.sweep\.SweepEnd",
    r"launcher\._target_": r"hydra\._internal\.core_plugins\.basic_launcher\.BasicLauncher"
    r"|hydra_plugins\.hydra_submitit_launcher\.submitit_launcher\.(Local|Slurm)Launcher",
    r"sweeper\._target_": r"hydra\._internal\.core_plugins\.basic_sweeper\.BasicSweeper"
    r"|hydra_plugins\.hydra_optuna_sweeper\.optuna_sweeper\.OptunaSweeper",
    r"sweeper\.sampler\._target_": r"optuna\.samplers\.(CmaEs|Grid|MOTPE|NSGAII|Random|TPE)Sampler",
}
# Our own settings that name files and folders to write.
_FILES = {"output": "", "grid": "", "data.cache": "", "reproduction": _NAME}
_NO_SETTINGS = r"(hydra|experiment|search|debug)\b"  # choices of files, and Hydra's own: these may be deleted

_NOT_GIVEN = "<not given>"

_compose = ConfigLoaderImpl.load_configuration
_merge = ConfigLoaderImpl._compose_config_from_defaults_list
_search = ConfigLoaderImpl._process_config_searchpath
_load_once = CachingConfigRepository.load_config


def guard_composition() -> None:
    """Make Hydra pass all that it composes to `refuse`, in this process and in those of a sweep's jobs.

    From then on, `${oc.env:...}` refuses to read secrets.
    """
    ConfigLoaderImpl.load_configuration = _compose_and_check  # type: ignore[method-assign]
    ConfigLoaderImpl._compose_config_from_defaults_list = _merge_by_choice  # type: ignore[method-assign]
    ConfigLoaderImpl._process_config_searchpath = _search_and_check  # type: ignore[method-assign, assignment]
    CachingConfigRepository.load_config = _count_and_load  # type: ignore[method-assign]
    OmegaConf.register_new_resolver("oc.env", _Environment(), replace=True)


class _Environment:
    """Replaces oc.env: reads a variable unless it holds a secret.

    Launchers pickle it with the other resolvers for each job, where unpickling it guards the composition too.
    """

    def __call__(self, name: str = "", default: Any = _NOT_GIVEN) -> str | None:
        value = os.environ.get(name, default)
        if value is _NOT_GIVEN:
            raise ConfigError(
                f"the environment variable {name} is not set: set it, or write ${{oc.env:{name},<value>}}."
            )
        text = None if value is None else str(value)  # a default may be a number, as for OmegaConf's own
        if is_secret(name) or find_secret(text or "") is not None:
            raise ConfigError(
                f"a setting reads the secret {name} by oc.env, and settings are written into the run's files: leave "
                "secrets in the environment, where the libraries that need them find them."
            )
        return text

    def __reduce__(self) -> tuple[Callable[[], "_Environment"], tuple[()]]:
        return _unpickle_environment, ()


def _unpickle_environment() -> _Environment:
    guard_composition()
    return _Environment()


def refuse(composed: DictConfig, overrides: Sequence[str] = ()) -> None:
    """Refuse a composed configuration that names a file or code, or has a secret in it, Hydra's own settings included.

    The words of the command line, `overrides`, may name files.
    """
    plain = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(plain, dict)
    refuse_endless_interpolations(composed)
    _refuse_name(plain.get("name"))
    entries = sorted(_entries(plain), key=lambda entry: entry[0].startswith("hydra."))
    has_secret = find_secret("\n".join(f"{key} {value}" for _, key, value in entries)) is not None  # in one search
    for place, key, value in entries:
        if has_secret:
            _refuse_secret(place, f"{key} {value}")
        if isinstance(value, str) and "${oc.env" in value:
            _resolve(composed, place, value)
        try:
            expected = _find_expected(composed, place, key, value, overrides)
        except ConfigCompositionException:
            if "${hydra." in str(value) and any(_is_said(place, override) for override in overrides):
                continue  # it may depend on what only a job has, such as its number
            for own, _, said in entries:  # if it depends on a wrong setting of the run, name that one
                _resolve(composed, own, said)
            raise
        if expected is None:
            continue
        if any(_is_said(place, override) for override in overrides) or _is_chosen(composed, place, value, overrides):
            continue
        if _names_code(key, value):
            raise ConfigCompositionException(
                f"{place} is {value}, expected none: no configuration may name code to run; remove it, or set it on "
                "the command line."
            )
        # Of variables only the names: hydra.job.env_copy has filled in their values from the environment.
        shown = "set" if place.startswith("hydra.job.env_set.") else f"{value!r}"
        raise ConfigCompositionException(
            f"{place} is {shown}, expected {expected}, because a configuration may name no file and no code: correct "
            "it, or set it on the command line."
        )


def _is_chosen(composed: DictConfig, place: str, value: Any, overrides: Sequence[str]) -> bool:
    """Return whether a value is the default of a Hydra plugin that the command line chooses."""
    for group in ("launcher", "sweeper"):
        choice = (OmegaConf.select(composed, "hydra.runtime.choices") or {}).get(f"hydra/{group}")
        if place.startswith(f"hydra.{group}.") and f"hydra/{group}={choice}" in overrides:
            with suppress(ConfigLoadError):
                own = OmegaConf.to_container(ConfigStore.instance().load(f"hydra/{group}/{choice}.yaml").node)
                return any(f"hydra.{group}.{at}" == place and known == value for at, _, known in _entries(own))
    return False


def _refuse_name(name: Any) -> None:
    """Refuse an experiment's name that cannot name a folder, before settings that depend on it are refused."""
    if isinstance(name, str) and name != "???" and "${" not in name and not re.fullmatch(_EXPERIMENT, name):
        raise ConfigCompositionException(
            f"name is {name!r}, expected at most 100 letters, digits, and _ . - between them: it becomes a folder's "
            "name."
        )


def _find_expected(composed: DictConfig, place: str, key: str, value: Any, overrides: Sequence[str]) -> str | None:
    """Return what is expected at a place; None if its value is allowed."""
    if place.startswith("hydra.job.env_set."):  # an empty value empties the variable
        return "nothing"
    if value in (None, "", "???"):
        return None
    if place.startswith("hydra.overrides."):  # what a file puts there would pass for the command line's
        return None if value in overrides else "nothing"
    if place.startswith("hydra."):
        known, own = _HARMLESS_CODE if key in _NAMES_CODE else _HARMLESS, place.removeprefix("hydra.")
        harmless = next((values for places, values in known.items() if re.fullmatch(places, own)), "")
    else:
        harmless = "" if _names_code(key, value) else _FILES.get(place, _TEXT)
    if re.fullmatch(harmless, str(value)) or re.fullmatch(harmless, _resolve(composed, place, value)):
        return None
    return _EXPECTED.get(harmless, "nothing")


def _is_said(place: str, override: str) -> bool:
    """Return whether an override sets a place, or a list or dict that contains it."""
    key, _, value = override.lstrip("+").partition("=")
    return place == key or (value.startswith(("[", "{")) and place.startswith(f"{key}."))


def _names_code(key: str, value: Any) -> bool:
    return key in _NAMES_CODE or (isinstance(value, str) and value.startswith(("ext://", "cfg://")))


@wraps(_compose)
def _compose_and_check(
    self: ConfigLoaderImpl, config_name: str | None, overrides: list[str], *args: Any, **settings: Any
) -> DictConfig:
    for override in overrides:
        _refuse_word(override, self.repository)
    self.words = overrides  # type: ignore[attr-defined]  # for _merge_by_choice
    composed = _compose(self, config_name, overrides, *args, **settings)
    if config_name is not None:  # else Hydra's own settings alone, for --hydra-help
        refuse(composed, overrides)
    return composed


@wraps(_merge)
def _merge_by_choice(self: ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
    defaults.sort(key=lambda default: (default.config_path or "").startswith("debug/"))  # after the experiment
    drop_replaced_values(defaults, repo, getattr(self, "words", ()))
    try:
        return _merge(self, defaults, repo)
    except ConfigCompositionException as error:
        raise explain_file(error) from None


@wraps(_search)
def _search_and_check(
    self: ConfigLoaderImpl, config_name: str | None, overrides: list[Override], repo: CachingConfigRepository
) -> None:
    loaded = repo.load_config(config_name) if config_name is not None else None
    path = None if loaded is None else OmegaConf.select(loaded.config, "hydra.searchpath")
    if path and not any(override.get_key_element() == "hydra.searchpath" for override in overrides):
        raise ConfigCompositionException(  # here, because pkg://... runs a package's code
            f"hydra.searchpath is {path}, expected nothing, because a configuration may name no file and no code: "
            "remove it, or set it on the command line."
        )
    _search(self, config_name, overrides, repo)


@wraps(_load_once)
def _count_and_load(self: CachingConfigRepository, config_path: str) -> ConfigResult | None:
    """Load a file; refuse hostile ones, and defaults lists that never end, in a circle or by naming several each."""
    self.num_named = getattr(self, "num_named", 0) + 1  # type: ignore[attr-defined]
    if self.num_named > MAX_FILES:  # type: ignore[attr-defined]
        raise ConfigCompositionException(
            f"{config_path} is one of more than {MAX_FILES} files that defaults lists name, perhaps in a circle: "
            "remove it from a list that leads to itself."
        )
    for source in self.delegate.get_sources():
        if source.scheme() == "file" and f"config_path={config_path}" not in self.cache:
            refuse_hostile_yaml(Path(source.path) / f"{config_path.removesuffix('.yaml').strip('/')}.yaml")
    try:
        return _load_once(self, config_path)
    except ValueError as error:  # Python's own, such as for a number with thousands of digits
        raise ConfigCompositionException(f"{config_path} cannot be read: {why(error)}: correct it there.") from None


def _entries(node: Any, place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the place, the key and the value of everything in nested dicts and lists."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in pairs:
        inside = f"{place}.{key}" if place else str(key)
        yield inside, str(key), "" if isinstance(value, dict | list) and key not in _NAMES_CODE else value
        yield from _entries(value, inside)


def _resolve(composed: DictConfig, place: str, value: Any) -> str:
    """Return a value as text, with its interpolations resolved."""
    if not isinstance(value, str) or "${" not in value:
        return str(value)
    try:
        found = OmegaConf.select(composed, place)
        return str(value if found is None else found)
    except OmegaConfBaseException as error:
        raise ConfigCompositionException(f"{place} is {value}: {add_remedy(why(error))}") from None


def _refuse_secret(place: str, text: str) -> None:
    if (what := find_secret(text)) is not None:
        raise ConfigCompositionException(
            f"{'a setting' if find_secret(place) else place} has {what} in it, which would be written into the run's "
            "files: leave secrets in the environment, where the libraries that need them find them."
        )


def _refuse_word(word: str, repo: IConfigRepository) -> None:
    """Refuse a word of the command line before an error of Hydra repeats its secret, or does not say what to do.

    It may not delete a setting either: whatever reads that first would fail.
    """
    _refuse_secret(word.partition("=")[0] if "=" in word else "an override", word)
    key, _, value = word.lstrip("+").partition("=")
    if word.startswith("~") and not re.match(_NO_SETTINGS, key.removeprefix("~")):
        key = key.removeprefix("~")
        raise ConfigCompositionException(
            f"{word} deletes {key}, expected a value of every setting: set {key}=..., or leave that word out."
        )
    if not key or (re.fullmatch(r"(?i)null|true|false|-?\d*\.?\d+", value) and repo.group_exists(key)):
        expected = "the name of a file of that group" if key else "<key>=<value>"
        raise ConfigCompositionException(f"{word}, expected {expected}: correct that word, or leave it out.")
