"""Counts as the paper prints them: 82M, 1.05B, 400M."""

_UNITS = {"M": 1e6, "B": 1e9}


def as_number(printed: str) -> float:
    """Return a printed count, such as 400M or 1.3B."""
    return float(printed[:-1]) * _UNITS[printed[-1]]


def as_printed(count: int, like: str) -> str:
    """Write a count with the unit and the decimals of another one, such as 82M or 1.05B."""
    decimals = len(like[:-1].partition(".")[2])
    return f"{count / _UNITS[like[-1]]:.{decimals}f}{like[-1]}"


def rounds_to(count: int, printed: str) -> bool:
    """Say whether a count, rounded to as many digits as a printed one has before its last zeros, is that one."""
    digits = printed[:-1]
    decimals = len(digits.partition(".")[2]) or len(digits.rstrip("0")) - len(digits)
    return round(count / _UNITS[printed[-1]], decimals) == float(digits)
