"""Checks of one setting each; a failure is one sentence: the name, the value, what was expected, how to set it."""


class ConfigError(ValueError):
    """A setting that is wrong in itself, or does not go with another one."""


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raise ConfigError unless `holds`."""
    if not holds:
        raise ConfigError(f"{name} is {value}, expected {expected}: set {name}=... accordingly.")


def at_least(name: str, value: float, least: float) -> None:
    """Refuse a value below `least`."""
    require(value >= least, name, value, f"{least:g} or more")


def above(name: str, value: float, bound: float) -> None:
    """Refuse a value that is not greater than `bound`."""
    require(value > bound, name, value, f"a number above {bound:g}")


def rate(name: str, value: float) -> None:
    """Refuse a value outside [0, 1)."""
    require(0 <= value < 1, name, value, "a number from 0 to less than 1")


def optional_at_least(name: str, value: float | None, least: float) -> None:
    """Refuse a value below `least`; None (null in YAML) means off."""
    require(value is None or value >= least, name, value, f"{least:g} or more, or null")


def fixed(name: str, value: str, expected: str, group: str) -> None:
    """Refuse another name than the composed group has: the name follows from the choice of a file in conf/."""
    if value != expected:
        raise ConfigError(
            f"{name} is {value}, but the settings beside it are those of {expected}: choose with {group}=..."
        )
