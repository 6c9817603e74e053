"""Files of settings and words of settings that many tests read: to parse one takes longer than to use it.

A test composes in an eighth of a second, and all tests do it a thousand times. Nothing else of a composition is kept.
"""

import copy
import pickle
from functools import cache
from types import SimpleNamespace
from typing import IO, Any

import omegaconf
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import base, grammar_parser

_parse_rule = OverridesParser.parse_rule


def remember_settings() -> None:
    """From now on, parse equal files, interpolations and words of a command line once, here and in forks."""
    files, words = dict[str, bytes](), dict[tuple[str, str], Any]()

    def load(stream: str | IO[str], **settings: Any) -> Any:
        if isinstance(stream, str):
            return yaml.load(stream, **settings)
        text = stream.read()
        if text not in files:
            stream.seek(0)  # errors name the file
            files[text] = pickle.dumps(yaml.load(stream, **settings))
        return pickle.loads(files[text])

    def parse_word(parser: OverridesParser, word: str, rule: str) -> Any:
        if (word, rule) not in words:
            words[word, rule] = _parse_rule(parser, word, rule)
        return copy.deepcopy(words[word, rule])

    omegaconf.omegaconf.yaml = SimpleNamespace(load=load, dump=yaml.dump)
    OverridesParser.parse_rule = parse_word
    base.parse = omegaconf._utils.parse = cache(grammar_parser.parse)  # their trees are only read
