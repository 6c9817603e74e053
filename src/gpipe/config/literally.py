"""Words of a command line that Hydra must not interpret: texts and names of files."""

import re
from collections.abc import Collection, Sequence


def take_literally(arguments: Sequence[str], keys: Collection[str], texts: Collection[str] = ()) -> list[str]:
    """Quote the values of some keys on a command line, so that Hydra takes commas and brackets in them literally.

    Quotes that reach the program are part of the value. null keeps its meaning, except for the keys of `texts`.
    """
    return [_quote(argument, keys, texts) for argument in arguments]


def make_word(key: str, value: object) -> str:
    """Return the word of a command line that sets a text, quoted if Hydra would interpret it."""
    word = f"{key}={value}"
    return word if re.fullmatch(r"[\w./+:@%=-]+", word, re.ASCII) else _quote(word, {key}, {key})


def _quote(argument: str, keys: Collection[str], texts: Collection[str]) -> str:
    key, equals, value = argument.partition("=")
    if key not in keys or not equals or (key not in texts and value == "null"):
        return argument
    plain = re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + r"\${", value)  # not an interpolation
    plain = re.sub(r'(\\+)(?="|$)', r"\1\1", plain).replace('"', r"\"")
    return f'{key}="{plain}"'
