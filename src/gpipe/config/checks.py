"""Checks of one setting each; an error is one sentence with the name, the value, what is allowed and the remedy."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args

# Multiplied by any other number of a run, this still fits a 64-bit float or a counter.
_LARGEST_NUMBER = 10**9
_LARGEST_OF_64_BITS = 2**63 - 1
_OF_64_BITS = re.compile(r"(.*\.)?(seed|\w+_bytes)")
MOST_PROCESSES = 4096
"""More processes or threads than this must be a typo, and would bring the machine down."""


class ConfigError(ValueError):
    """A wrong setting, or two settings that do not fit each other."""


def why(error: Exception) -> str:
    """Return the first line of OmegaConf's message, without the words on where the error was raised."""
    first, _, _ = str(error).partition("\n")
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", first)


def add_remedy(message: str) -> str:
    """Return a message as a sentence with a remedy; a message that ends in a full stop has one."""
    return message if message.endswith(".") else f"{message}: correct it."


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raise ConfigError unless `holds`."""
    if not holds:
        raise ConfigError(f"{name} is {in_one_line(value)}, expected {expected}: set {name}=... accordingly.")


def in_one_line(value: object) -> str:
    """Return a value as one line of text; of a text of several lines, line breaks are escaped."""
    return str(value) if str(value).splitlines() == [str(value)] else repr(value)


def at_least(name: str, value: float, least: float) -> None:
    """Refuse a value below `least`."""
    require(value >= least, name, value, f"{least:g} or more")


def within(name: str, value: float, least: float, most: float) -> None:
    """Refuse a value outside [least, most]."""
    require(least <= value <= most, name, value, f"a number from {least:g} to {most:g}")


def positive(name: str, value: float | None) -> None:
    """Refuse a number that is not above 0; None (null in YAML) means off."""
    require(value is None or value > 0, name, value, "a number above 0")


def rate(name: str, value: float) -> None:
    """Refuse a value outside [0, 1)."""
    require(0 <= value < 1, name, value, "a number from 0 to less than 1")


def optional_at_least(name: str, value: float | None, least: float) -> None:
    """Refuse a value below `least`; None (null in YAML) means off."""
    require(value is None or value >= least, name, value, f"{least:g} or more, or null")


def fixed(name: str, value: str, expected: str, group: str) -> None:
    """Refuse any name but that of the chosen file in conf/."""
    if value != expected:
        raise ConfigError(
            f"{name} is {in_one_line(value)}, but the settings beside it are those of {expected}: choose with "
            f"{group}=..."
        )


def countable(settings: object) -> None:
    """Refuse infinities, NaN and huge numbers anywhere in a dataclass of settings: JSON cannot save them."""
    for name, value, kind in _settings_of(settings):
        alternative = ", or null" if type(None) in get_args(kind) else ""
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float):
                expected = f"a finite number of at most {_LARGEST_NUMBER:.0e}{alternative}"
                require(abs(number) <= _LARGEST_NUMBER, name, value, expected)
            elif isinstance(number, int):
                is_wide = _OF_64_BITS.fullmatch(name)
                expected = f"a whole number of at most {'64 bits' if is_wide else f'{_LARGEST_NUMBER:,}'}{alternative}"
                require(abs(number) <= (_LARGEST_OF_64_BITS if is_wide else _LARGEST_NUMBER), name, value, expected)


def _settings_of(settings: Any, place: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield the full name, the value and the type of every field, including those of nested dataclasses."""
    for field in fields(settings):
        name, value = f"{place}{field.name}", getattr(settings, field.name)
        if is_dataclass(value):
            yield from _settings_of(value, f"{name}.")
        else:
            yield name, value, field.type
