"""What many tests compose of, remembered: Hydra takes an eighth of a second for one composition, and a third of it so.

All tests compose two thousand times, from the same hundred files. Nothing of a composition is kept but what it reads.
"""

import copy
import pickle
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from hydra._internal import defaults_list
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import InputDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, _utils, base, grammar_parser

_load, _parse_rule = OmegaConf.load, OverridesParser.parse_rule
_create_interpolation_map, _resolve = defaults_list._create_interpolation_map, InputDefault._resolve_interpolation_impl


def remember_settings() -> None:
    """From now on, parse equal files, interpolations and words of a command line once, here and in forks."""
    files, words = dict[str, bytes](), dict[tuple[str, str], Any]()

    def load(file: str | Path | IO[Any]) -> Any:
        if isinstance(file, str | Path):
            return _load(file)
        text = file.read()
        if text not in files:
            file.seek(0)  # errors name the file
            files[text] = pickle.dumps(_load(file))
        return pickle.loads(files[text])

    def parse_word(parser: OverridesParser, word: str, rule: str) -> Any:
        if (word, rule) not in words:
            words[word, rule] = _parse_rule(parser, word, rule)
        return copy.deepcopy(words[word, rule])

    def resolve(default: InputDefault, create: Callable[[], Any], value: str) -> str:
        return _resolve(default, create(), value)

    for owner, name, replacement in (
        (OmegaConf, "load", staticmethod(load)),
        (OverridesParser, "parse_rule", parse_word),
        *((module, "parse", cache(grammar_parser.parse)) for module in (base, _utils)),  # their trees are only read
        # Hydra copies all schemas for each composition, which then copies those that it needs.
        (ConfigStore, "__deepcopy__", lambda store, _: store),
        # Hydra makes a map of all choices for each file, for the few that name another by an interpolation.
        (defaults_list, "_create_interpolation_map", lambda *of: cache(partial(_create_interpolation_map, *of))),
        (InputDefault, "_resolve_interpolation_impl", resolve),
    ):
        setattr(owner, name, replacement)
