"""Words of a command line that Hydra must not interpret: texts and names of files."""

import re
from collections.abc import Collection, Sequence


def take_literally(arguments: Sequence[str], keys: Collection[str], texts: Collection[str] = ()) -> list[str]:
    """Quote, for Hydra, what a command line says of some keys, in which commas and brackets mean nothing.

    `text=Hello, world` is that sentence, whatever is in it; quotes that reach the program belong to it.

    Args:
        arguments: the words of the command line.
        keys: whose values are quoted; the word null keeps its meaning.
        texts: those among them where null is a word like any other.
    """
    return [_quoted(argument, keys, texts) for argument in arguments]


def make_word(key: str, value: object) -> str:
    """Return the word of a command line that gives a setting a text, quoted where Hydra would interpret it."""
    word = f"{key}={value}"
    return word if re.fullmatch(r"[\w./+:@%=-]+", word, re.ASCII) else _quoted(word, {key}, {key})


def _quoted(argument: str, keys: Collection[str], texts: Collection[str]) -> str:
    key, equals, value = argument.partition("=")
    if key not in keys or not equals or (key not in texts and value == "null"):
        return argument
    plain = re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + r"\${", value)  # not an interpolation
    plain = re.sub(r'(\\+)(?="|$)', r"\1\1", plain).replace('"', r"\"")
    return f'{key}="{plain}"'
