"""The pages: their tables are made from records.

A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->` of README.md, of a page in docs/ or of one in
reproductions/. The page of a claim shows the records beside it; every other page shows all records.
"""

import csv
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from gpipe.records import (
    Record,
    read_records,
)
from reproductions import FOLDER, PAPER_FILE, ROOT, RUNS_FILE, faults
from reproductions.bubble import tables as bubble
from reproductions.claims import Claim, claims_table, describe_chance, verdicts_table
from reproductions.deviations import deviations_table
from reproductions.figure3_multilingual import tables as figure3
from reproductions.table import Table, make_table
from reproductions.table1_model_size import tables as table1
from reproductions.table2_throughput import tables as table2
from reproductions.table3_slow_links import tables as table3
from reproductions.table4_imagenet_and_transfer import tables as table4
from reproductions.table5_batch_size import tables as table5
from reproductions.task_independence import tables as task_independence

CLAIMS: dict[str, ModuleType] = {
    "bubble": bubble,
    "table1_model_size": table1,
    "table2_throughput": table2,
    "table3_slow_links": table3,
    "table4_imagenet_and_transfer": table4,
    "figure3_multilingual": figure3,
    "table5_batch_size": table5,
    "task_independence": task_independence,
}
"""The module of each claim's tables, by its folder's name, in the order of the table of claims."""
TABLES: dict[str, tuple[str, Table]] = {
    table.__name__: (folder, table) for folder, module in {**CLAIMS, "": faults}.items() for table in module.TABLES
}
"""Each table by its name, with the folder of the claim whose paper.csv it stands beside."""
_BLOCK = re.compile(r"(<!-- table: (?P<name>[a-z0-9_]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill_tables(page: Path, make: Callable[[str], str]) -> str:
    """Return the text of a page with each of its tables made anew from its name.

    Raises:
        ValueError: The page has no table.
    """
    text, count = _BLOCK.subn(
        lambda block: f"{block[1]}{make(block['name'])}{block[3]}", page.read_text(encoding="utf-8")
    )
    if count == 0:
        raise ValueError(f"{page} has no table: write <!-- table: NAME --> and <!-- end --> into it.")
    return text


def read_paper(folder: Path) -> list[dict[str, str]]:
    """Read the paper's numbers for a claim: the rows of its paper.csv, none where there is no such file."""
    if not (folder / PAPER_FILE).exists():
        return []
    with (folder / PAPER_FILE).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def find_pages(root: Path) -> dict[Path, list[Record]]:
    """Return each page below the repository's root that shows results, with the records that it shows."""
    folders = sorted(path.parent for path in (root / FOLDER).glob(f"*/{RUNS_FILE}"))
    found = {folder / "README.md": read_records(folder / RUNS_FILE) for folder in folders}
    every = read_all(root)
    others = [root / "README.md", *sorted((root / "docs").rglob("*.md")), root / FOLDER / "README.md"]
    marked = [path for path in others if path.exists() and "<!-- table: " in path.read_text(encoding="utf-8")]
    return {**found, **dict.fromkeys(marked, every)}


def read_all(root: Path) -> list[Record]:
    """Return the records of all claims, and those of the tests of reliability, which belong to no claim."""
    files = [*sorted((root / FOLDER).glob(f"*/{RUNS_FILE}")), root / faults.RECORDS]
    return [record for file in files if file.exists() for record in read_records(file)]


def render_pages(root: Path) -> dict[Path, str]:
    """Return the text that each page below the repository's root should have."""
    claimed = find_claims(root)
    return {
        page: fill_tables(page, partial(_make_table, root, page, records, claimed))
        for page, records in find_pages(root).items()
    }


def find_claims(root: Path) -> dict[str, list[Claim]]:
    """Return the claims of each folder that is there, from the records of all folders."""
    records = read_all(root)
    return {
        folder: module.claims(records, read_paper(root / FOLDER / folder))
        for folder, module in CLAIMS.items()
        if (root / FOLDER / folder).is_dir()
    }


def _make_table(
    root: Path, page: Path, records: Sequence[Record], claimed: Mapping[str, Sequence[Claim]], name: str
) -> str:
    """Return a table of a page.

    Raises:
        ValueError: There is no table of this name.
    """
    folder = page.parent.name if page.parent.parent == root / FOLDER else None
    if name == "claims":
        if folder is not None:
            return claims_table([(folder, claimed.get(folder, []))])
        return claims_table(claimed.items(), _link(root, page))
    if name == "verdicts":
        return verdicts_table(claimed.items(), _link(root, page))
    if name == "chance":
        return describe_chance(claim for claims in claimed.values() for claim in claims)
    if name == "deviations":
        return deviations_table(root, folder)
    if name not in TABLES:
        known = ", ".join((*TABLES, "claims", "verdicts", "chance", "deviations"))
        raise ValueError(f"{page} asks for the table {name!r}; there are {known}.")
    claim, table = TABLES[name]
    return make_table(table, records, read_paper(root / FOLDER / claim))


def _link(root: Path, page: Path) -> str:
    """Return the path from a page to the folders of the claims, to put before their names."""
    path = os.path.relpath(root / FOLDER, page.parent)
    return "" if path == "." else f"{path}/"


def write_pages(root: Path = ROOT) -> None:
    """Rewrite the tables of every page from the records."""
    for page, text in render_pages(root).items():
        page.write_text(text, encoding="utf-8")
