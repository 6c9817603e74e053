"""Render the tables of all pages from the records.

python -m reproductions                                                 render every page
python -m reproductions add runs/<name>/<date> reproductions/<claim>    add the record of a run first
python -m reproductions faults faults.jsonl                             replace the record of the tests of faults first
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from gpipe.launch.errors import report_errors
from gpipe.records import write_records
from reproductions import FOLDER, ROOT, faults
from reproductions.additions import add_records, read_run
from reproductions.pages import write_pages


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> None:
    """Read the command line; add or replace a record if asked to, then render."""
    parser = argparse.ArgumentParser(prog="python -m reproductions", description="Render all pages from the records.")
    commands = parser.add_subparsers(dest="command")
    add = commands.add_parser("add", help="add the record of a run first")
    add.add_argument("run", type=Path, help="the run's folder, runs/<name>/<date>")
    add.add_argument("claim", type=Path, help="the claim's folder, reproductions/<claim>")
    replace = commands.add_parser("faults", help="replace the record of the tests of faults first")
    replace.add_argument("rows", type=Path, help="the file that make reliability wrote (GPIPE_FAULT_RECORDS)")
    options = parser.parse_args(arguments)
    with report_errors():
        if options.command == "add":
            folder = options.claim.resolve()
            if not folder.is_dir() or folder.parent != (root / FOLDER).resolve():
                expected = f"expected one in {root / FOLDER}: correct its name."
                raise ValueError(f"{options.claim} is not the folder of a claim, {expected}")
            is_new = add_records(folder.name, [read_run(options.run)], root) > 0
            print(f"{options.run} is {'now' if is_new else 'already'} on record in {options.claim}")
        elif options.command == "faults":
            write_records(root / faults.RECORDS, [faults.read_record(options.rows)])
    write_pages(root)


if __name__ == "__main__":
    main()
