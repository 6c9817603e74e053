"""Check the arguments of the functions that build models."""


def check_at_least(name: str, value: int, least: int) -> None:
    """Raise ValueError for a value below `least`."""
    if value < least:
        raise ValueError(f"{name} is {value}, expected {least} or more: give a larger number.")


def check_probability(name: str, value: float) -> None:
    """Raise ValueError for a value outside [0, 1)."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} is {value}, expected a probability in [0, 1): give 1 - keep probability.")
