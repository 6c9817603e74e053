"""What many tests compose of, remembered: one composition takes a sixth of the time that Hydra takes.

All tests compose thousands of times, from the same hundred files. Each file is read once, and equal files are merged
once, by all processes of the tests; then the words of each command line are applied, and what came of it is checked.
Folders of settings outside of this repository are read and merged each time.
"""

import copy
import os
import pickle
from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import InputDefault, ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf, _utils, base, grammar_parser

from gpipe.config import gate
from gpipe.config.composed import CONF
from tests.support.program_server import REMEMBERED

_OURS = {("pkg", "hydra.conf"), ("file", str(CONF)), ("structured", "")}
_load, _merge, _parse_rule = ConfigRepository.load_config, gate._merge, OverridesParser.parse_rule
_create_interpolation_map, _resolve = defaults_list._create_interpolation_map, InputDefault._resolve_interpolation_impl


def remember_settings() -> None:
    """From now on, read and merge equal files, and parse equal words of a command line, once, here and in forks."""
    results, words = dict[str, bytes](), dict[tuple[str, str], Any]()

    def load(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
        if not _has_ours_alone(repository):
            return _load(repository, config_path)
        if config_path not in results:
            loaded = _load(repository, config_path)
            if loaded is None or loaded.path.startswith("structured:"):  # a test may put another one there
                return loaded
            results[config_path] = pickle.dumps(loaded)
        found: ConfigResult = pickle.loads(results[config_path])
        return found

    def parse_word(parser: OverridesParser, word: str, rule: str) -> Any:
        if (word, rule) not in words:
            words[word, rule] = _parse_rule(parser, word, rule)
        return copy.deepcopy(words[word, rule])

    def resolve(default: InputDefault, create: Callable[[], Any], value: str) -> str:
        return _resolve(default, create(), value)

    for owner, name, replacement in (
        (ConfigRepository, "load_config", load),
        (gate, "_merge", _merge_once),
        (OverridesParser, "parse_rule", parse_word),
        *((module, "parse", cache(grammar_parser.parse)) for module in (base, _utils)),  # their trees are only read
        # Hydra copies all schemas for each composition, which then copies those that it needs.
        (ConfigStore, "__deepcopy__", lambda store, _: store),
        # Hydra makes a map of all choices for each file, for the few that name another by an interpolation.
        (defaults_list, "_create_interpolation_map", lambda *of: cache(partial(_create_interpolation_map, *of))),
        (InputDefault, "_resolve_interpolation_impl", resolve),
        (version, "_get_version", cache(version._get_version)),
    ):
        setattr(owner, name, replacement)


def _merge_once(self: ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
    """Merge files, less the sections that a later choice has removed from them; or read what came of it before."""
    folder = os.environ.get(REMEMBERED)
    if folder is None or not _has_ours_alone(repo):
        return _merge(self, defaults, repo)
    key = []
    for default in defaults:
        config = repo.load_config(str(default.config_path)).config
        key.append((default.config_path, default.package, default.primary, OmegaConf.get_type(config), list(config)))
    path = Path(folder) / f"merged-{sha256(repr(key).encode()).hexdigest()}"
    if path.exists():
        found: DictConfig = pickle.loads(path.read_bytes())
        return found
    merged = _merge(self, defaults, repo)
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        unfinished.write_bytes(pickle.dumps(merged))
        unfinished.rename(path)
    except (OSError, AttributeError):  # the test lets the disk be full; or it has a schema of its own
        unfinished.unlink(missing_ok=True)
    return merged


def _has_ours_alone(repository: IConfigRepository) -> bool:
    return {(source.scheme(), source.path) for source in repository.get_sources()} <= _OURS
