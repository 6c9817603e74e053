"""Checks of settings; an error is one sentence with the name, the value, what is allowed and the remedy.

A field of a `Section` is declared with the values that it takes: `num_layers: int = at_least(1)`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self, get_args

from omegaconf import MISSING

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


def allowed(fits: Callable[[Any], object], expected: str) -> Any:
    """Declare a setting whose values `fits` accepts, and which is null only if its type says so."""
    return field(default=MISSING, metadata={"fits": fits, "expected": expected})


def at_least(least: int) -> Any:
    """Declare a number of `least` or more."""
    return allowed(lambda value: value >= least, f"{least} or more")


def within(least: int, most: int, what: str = "a number") -> Any:
    """Declare a number in [least, most]."""
    return allowed(lambda value: least <= value <= most, f"{what} from {least} to {most}")


def positive() -> Any:
    """Declare a number above 0."""
    return allowed(lambda value: value > 0, "a number above 0")


def rate() -> Any:
    """Declare a number in [0, 1)."""
    return allowed(lambda value: 0 <= value < 1, "a number from 0 to less than 1")


def share(what: str) -> Any:
    """Declare a number in (0, 1]."""
    return allowed(lambda value: 0 < value <= 1, f"{what} in (0, 1]")


def kind(name: str) -> Any:
    """Declare the name of a kind of settings, which only another file in conf/ changes."""
    return field(default=name, metadata={"kind": name})


@dataclass
class Section:
    """Settings that refuse, when they are built, what their declarations do not allow.

    Attributes:
        place: what stands before their names on a command line.
    """

    place: ClassVar[str] = ""

    @classmethod
    def kinds(cls) -> list[type[Self]]:
        """Return this class and all that inherit from it."""
        return [cls, *(kind for child in cls.__subclasses__() for kind in child.kinds())]

    def values_but(self, *left_out: str) -> dict[str, Any]:
        """Return the settings by name, apart from some: the arguments of what has parameters of the same names."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in left_out}

    def __post_init__(self) -> None:
        for declared in fields(self):
            name, value = f"{self.place}{declared.name}", getattr(self, declared.name)
            is_optional = type(None) in get_args(declared.type)
            alternative = ", or null" if is_optional else ""
            _require_countable(name, value, alternative)
            if "kind" in declared.metadata and value != (expected := declared.metadata["kind"]):
                raise ConfigError(
                    f"{name} is {in_one_line(value)}, but the settings beside it are those of {expected}: choose with "
                    f"{self.place.rstrip('.')}=..."
                )
            if "fits" in declared.metadata and not (value is None and is_optional):
                shown = repr(value) if isinstance(value, str) else value
                require(declared.metadata["fits"](value), name, shown, f"{declared.metadata['expected']}{alternative}")


def _require_countable(name: str, value: object, alternative: str) -> None:
    """Refuse infinities, NaN and huge numbers, which JSON cannot save, and lists within a list."""
    for number in value if isinstance(value, list) else [value]:
        is_nested = isinstance(value, list) and isinstance(number, list | dict)
        require(not is_nested, name, value, f"a list of single values{alternative}")
        if isinstance(number, float):
            expected = f"a finite number of at most {_LARGEST_NUMBER:.0e}{alternative}"
            require(abs(number) <= _LARGEST_NUMBER, name, value, expected)
        elif isinstance(number, int):
            is_wide = _OF_64_BITS.fullmatch(name)
            expected = f"a whole number of at most {'64 bits' if is_wide else f'{_LARGEST_NUMBER:,}'}{alternative}"
            require(abs(number) <= (_LARGEST_OF_64_BITS if is_wide else _LARGEST_NUMBER), name, value, expected)
