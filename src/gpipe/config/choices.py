"""A file that is chosen for a group replaces what was said about that group before.

    python train.py +experiment=amoebanet_imagenet_laptop pipeline=interleaved

Hydra merges an experiment's values over the files of the groups, whoever chose these. Here the experiment's values of
`pipeline:` would remain, and the choice on the command line would have no effect. The same holds for an experiment that
inherits from another one and chooses a file of its own.
"""

from collections.abc import Iterable

from hydra._internal.config_repository import IConfigRepository
from hydra.core.default_element import GroupDefault, ResultDefault
from omegaconf import DictConfig


def drop_replaced_values(defaults: Iterable[ResultDefault], repo: IConfigRepository, words: Iterable[str]) -> None:
    """Remove from each loaded file the sections of groups that are chosen later.

    Args:
        defaults: the files that are about to be merged, in this order.
        repo: holds them; it caches what it loads, so that it is merged without these sections.
        words: those of the command line, which chooses last.
    """
    chosen = {word.lstrip("+").partition("=")[0] for word in words}
    for default in reversed(list(defaults)):
        loaded = None if default.package or default.config_path is None else repo.load_config(default.config_path)
        if loaded is None or loaded.path.startswith("structured:") or not isinstance(loaded.config, DictConfig):
            continue
        for section in chosen & {str(key) for key in loaded.config}:
            del loaded.config[section]
        overrides = (item for item in loaded.defaults_list or () if isinstance(item, GroupDefault) and item.override)
        chosen |= {str(item.group).removeprefix("/") for item in overrides}
