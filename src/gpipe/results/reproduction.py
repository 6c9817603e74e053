"""Turn the records of a reproduction into the tables of its README."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from gpipe.results.records import Record, read_records
from gpipe.results.tables import TABLES

_BLOCK = re.compile(r"(<!-- table: (?P<name>[a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(folder: Path, tables: Mapping[str, Callable[[list[Record]], str]] = TABLES) -> str:
    """Return the README of a reproduction with each table made from `runs.jsonl`.

    A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`.

    Args:
        folder: with README.md and runs.jsonl.
        tables: how to make each of them from the records.

    Raises:
        ValueError: the README names a table that nobody can make, or has none.
    """
    records = read_records(folder / "runs.jsonl")

    def replace(block: re.Match[str]) -> str:
        name = block["name"]
        if name not in tables:
            raise ValueError(f"{folder / 'README.md'} asks for the table {name!r}; there are {', '.join(tables)}")
        return f"{block[1]}{tables[name](records)}{block[3]}"

    text, count = _BLOCK.subn(replace, (folder / "README.md").read_text())
    if count == 0:
        raise ValueError(f"{folder / 'README.md'} has no table; write <!-- table: NAME --> and <!-- end --> into it")
    return text


def render(folder: Path) -> None:
    """Rewrite the tables of a reproduction's README from its records."""
    (folder / "README.md").write_text(rendered(folder))
