"""Turn the records of the reproductions into the tables of the READMEs.

python -m gpipe.results.reproduction                                       render every README anew
python -m gpipe.results.reproduction add runs/<name>/<date> reproductions/<claim>     add a run's record first
"""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from gpipe.results.records import RECORD_FILE, Record, append_record, read_records
from gpipe.results.tables import TABLES

RUNS_FILE = "runs.jsonl"
_BLOCK = re.compile(r"(<!-- table: (?P<name>[a-z0-9_]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(readme: Path, records: list[Record], tables: Mapping[str, Callable[[list[Record]], str]] = TABLES) -> str:
    """Return a README with each of its tables made from records.

    A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`; `tables` says how to make each of them.
    Raises ValueError where the README asks for a table that nobody can make, or for none.
    """

    def replace(block: re.Match[str]) -> str:
        name = block["name"]
        if name not in tables:
            raise ValueError(f"{readme} asks for the table {name!r}; there are {', '.join(tables)}.")
        return f"{block[1]}{tables[name](records)}{block[3]}"

    text, count = _BLOCK.subn(replace, readme.read_text(encoding="utf-8"))
    if count == 0:
        raise ValueError(f"{readme} has no table; write <!-- table: NAME --> and <!-- end --> into it.")
    return text


def readmes(root: Path) -> dict[Path, list[Record]]:
    """Return each README below the repository's root that shows results, with the records that it shows.

    That of a reproduction shows its own; the one at the root may show all.
    """
    folders = sorted(path.parent for path in (root / "reproductions").glob(f"*/{RUNS_FILE}"))
    found = {folder / "README.md": read_records(folder / RUNS_FILE) for folder in folders}
    every = [record for records in found.values() for record in records]
    return {**found, root / "README.md": every}


def render(root: Path) -> None:
    """Rewrite the tables of every README from the records."""
    for readme, records in readmes(root).items():
        readme.write_text(rendered(readme, records), encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Add the record of a run where that is asked for, then render."""
    match arguments:
        case []:
            pass
        case ["add", run, folder]:
            (record,) = read_records(Path(run) / RECORD_FILE)
            append_record(Path(folder) / RUNS_FILE, record)
        case _:
            raise SystemExit(__doc__)
    render(Path.cwd())


if __name__ == "__main__":
    main(sys.argv[1:])
