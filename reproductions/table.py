"""Build the tables of all claims."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

from gpipe.records import Record

Table = Callable[..., str]
"""(records) -> Markdown, or (records, paper) -> Markdown for a table that stands beside the paper's numbers."""
Paper = Sequence[Mapping[str, str]]
"""The rows of a paper.csv."""
_UNITS = {"M": 1e6, "B": 1e9}


def make_table(table: Table, records: Sequence[Record], paper: Paper) -> str:
    """Return a table; pass it the paper's numbers if it takes them."""
    return table(records, paper) if "paper" in signature(table).parameters else table(records)


def name_table(name: str, table: Table) -> Table:
    """Return a table that pages ask for by another name."""
    named = partial(table)
    named.__name__ = name  # type: ignore[attr-defined]
    return named


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; all columns but the first are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def write_table(rows: Iterable[Any], columns: Mapping[str, Callable[[Any], object]]) -> str:
    """Return a Markdown table; each column has a title, and a function that writes its cell of a row."""
    return markdown(list(columns), ([write(row) for write in columns.values()] for row in rows))


def provenance(record: Record | None, program: str) -> str:
    """Return where a record comes from: command, kind of its numbers, date, commit, hardware and packages."""
    if record is None:
        return not_run(program)
    hardware = ", ".join(f"{name} {value}" for name, value in record.hardware.items() if value)
    packages = ", ".join(f"{name} {version}" for name, version in record.packages.items())
    commit = (record.commit or "outside git")[:12] + (" with uncommitted changes" if record.dirty else "")
    rows = [
        ["command", f"`{record.command}`"],
        ["numbers", record.kind],
        ["date, commit", f"{record.date[:10]}, {commit}"],
        ["hardware", hardware],
        ["packages", packages],
    ]
    return markdown(["", ""], rows)


def newest(records: Iterable[Record], experiment: str | None = None) -> Record | None:
    """Return the newest record, of an experiment if it is given, or None."""
    found = [record for record in records if experiment in (None, record.experiment)]
    return max(found, key=lambda record: record.date, default=None)


def not_run(program: str) -> str:
    """Return the text that replaces a table without a record."""
    return f"Not run: {program}.\n"


def format_value(value: float | None, form: str, scale: float = 1) -> str:
    """Write a number times a scale, or nothing for None."""
    return "" if value is None else f"{value * scale:{form}}"


def as_number(printed: str) -> float:
    """Return a printed count, such as 400M or 1.3B."""
    return float(printed[:-1]) * _UNITS[printed[-1]]


def as_printed(count: int, like: str) -> str:
    """Write a count with the unit and the decimals of another one, such as 82M or 1.05B."""
    decimals = len(like[:-1].partition(".")[2])
    return f"{count / _UNITS[like[-1]]:.{decimals}f}{like[-1]}"


def rounds_to(count: int, printed: str) -> bool:
    """Return whether a count rounds to a printed one, at the digits before its last zeros."""
    digits = printed[:-1]
    decimals = len(digits.partition(".")[2]) or len(digits.rstrip("0")) - len(digits)
    return round(count / _UNITS[printed[-1]], decimals) == float(digits)
