"""Files of a group of settings: a chosen file replaces what was set in the group before.

    python train.py +experiment=amoebanet_imagenet_laptop pipeline=interleaved

Hydra merges an experiment's values over the groups' files, even over a file that the command line chooses. In this
example, the experiment's `pipeline:` values would win, and `pipeline=interleaved` would have no effect. The same holds
for an experiment that inherits from another one and chooses its own file.

A file for `data`, `model` or `optimizer` has the settings of one kind only: of images or of text, for example. It
inherits them from a file of that kind. Without that, Hydra would refuse correct settings as unknown.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from hydra.core.default_element import GroupDefault, ResultDefault
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from gpipe._compat.hydra import IConfigRepository
from gpipe.config.checks import why
from gpipe.config.data import DataConfig
from gpipe.config.model import ModelConfig
from gpipe.config.training import OptimizerConfig

_PARENTS: dict[Any, str] = {
    DataConfig: "image_folder or parallel_text",
    ModelConfig: "amoebanet_d",
    OptimizerConfig: "adamw",
}


def explain_file(error: ConfigCompositionException) -> ConfigCompositionException:
    """Return Hydra's error about a file as one sentence, with what the file should inherit where that helps."""
    fault = error.__context__
    if not isinstance(fault, OmegaConfBaseException):
        return error
    place, _, _ = str(error).partition(": ")
    if place == "In 'plan'" and "'RunConfig'" in why(fault):  # plan.py's own are a PlanConfig
        return ConfigCompositionException(
            "--config-name is plan, the configuration of plan.py, but train.py composes the configuration train: "
            "correct the name, or leave --config-name out."
        )
    parents = _PARENTS.get(fault.object_type) if isinstance(fault, ConfigKeyError) else None
    if parents is None:
        return ConfigCompositionException(f"{place}: {fault.full_key or 'the file'}: {why(fault)}: correct it there.")
    return ConfigCompositionException(
        f"{place}: {fault.full_key} is known only in a file that inherits from another one of its kind: begin it with "
        f"`defaults: [<parent>, _self_]`, where <parent> is a file such as {parents}."
    )


def drop_replaced_values(defaults: Iterable[ResultDefault], repo: IConfigRepository, words: Iterable[str]) -> None:
    """Remove from each loaded file the sections of groups that are chosen later.

    Args:
        defaults: the files that are about to be merged, in this order.
        repo: holds them; it caches what it loads, so that it is merged without these sections.
        words: those of the command line, which chooses last.
    """
    files = [loaded for default in defaults if (loaded := _load(default, repo)) is not None]
    usual = {
        group: value for overrides in (False, True) for loaded in files for group, value in _choices(loaded, overrides)
    }
    words_split = (word.lstrip("+").partition("=") for word in words)
    # A choice of the file that is chosen anyway changes nothing; {key:value} chooses none, and is merged.
    chosen = {
        group
        for group, _, value in words_split
        if usual.get(group) != value and not value.lstrip().startswith("{") and repo.group_exists(group)
    }
    for loaded in reversed(files):
        for section in chosen & {str(key) for key in loaded.config}:
            del loaded.config[section]
        chosen |= {group for group, _ in _choices(loaded, overrides=True)}


def _load(default: ResultDefault, repo: IConfigRepository) -> ConfigResult | None:
    """Return a file that sets values of several groups; None for a group's own file and for a schema."""
    if default.package or default.config_path is None:
        return None
    loaded = repo.load_config(default.config_path)
    if loaded is None or loaded.path.startswith("structured:") or not isinstance(loaded.config, DictConfig):
        return None
    return loaded


def _choices(loaded: ConfigResult, overrides: bool) -> Iterator[tuple[str, str]]:
    """Yield the groups for which a file chooses, each with its choice: overrides, or first choices."""
    for item in loaded.defaults_list or ():
        if isinstance(item, GroupDefault) and bool(item.override) == overrides:
            yield str(item.group).removeprefix("/"), str(item.value)
