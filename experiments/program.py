"""The parts that all studies share: the same options, a line of progress, and a place for the records."""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gpipe.records import Record, append_record, without_places
from reproductions import FOLDER, ROOT, RUNS_FILE
from reproductions.additions import add_records
from reproductions.pages import read_paper, write_pages
from reproductions.table import Table, make_table

_NOT_RUN = "Not run: "  # how the text of `not_run` begins
_LINE_SECONDS = 10.0  # between two lines of progress in a file
Item = TypeVar("Item")


class StudyProgram:
    """The command line of a study, and what becomes of its records.

    Args:
        document: The docstring of the program. Its first line describes the program in the help text.
        tables: The tables that show the records, by the claim's folder in reproductions/.
        rounds: How often the study repeats a measurement; None without repetitions.
        what_rounds_are: The help text of `--rounds`.

    Attributes:
        parser: The parser, to which a study adds its own options.
    """

    def __init__(
        self,
        document: str | None,
        tables: Mapping[str, Sequence[Table]],
        rounds: int | None = None,
        what_rounds_are: str = "rounds that count",
    ) -> None:
        self._tables = tables
        self._folder: Path | None = None
        self._is_recorded = False
        places = " and ".join(f"{FOLDER}/{claim}" for claim in tables)
        self.parser = argparse.ArgumentParser(description=(document or "").splitlines()[0])
        if rounds is not None:
            self.parser.add_argument(
                "--rounds", type=int, default=rounds, help=f"{what_rounds_are}; default: %(default)s"
            )
        self.parser.add_argument(
            "--record",
            nargs="?",
            const="",
            metavar="FOLDER",
            help=f"add the records to {places} and render all pages, or add them to FOLDER/{RUNS_FILE}",
        )

    def parse(self) -> argparse.Namespace:
        """Read the command line."""
        options = self.parser.parse_args()
        self._is_recorded = options.record is not None
        self._folder = Path(options.record) if options.record else None
        if options.__dict__.get("rounds", 1) < 1:
            self.parser.error(f"--rounds is {options.rounds}, but it must be at least 1.")
        return options

    def require_folder(self, reason: str) -> None:
        """Refuse `--record` without a folder, because what this run measures does not belong on a page."""
        if self._is_recorded and self._folder is None:
            self.parser.error(f"--record needs a folder here, such as --record runs/trial: {reason}.")

    def publish(self, records: Mapping[str, Sequence[Record]]) -> None:
        """Print the tables of the records on standard output; with `--record`, keep the records.

        Args:
            records: by the claim's folder in reproductions/.
        """
        console = Console()
        for claim, made in records.items():
            paper = read_paper(ROOT / FOLDER / claim)
            for table in self._tables[claim]:
                text = make_table(table, made, paper)
                if text.startswith(_NOT_RUN):  # such as what was left out on request
                    continue
                if console.is_terminal:
                    console.print(Markdown(text))
                else:
                    print(text)
        places = " and ".join(f"{FOLDER}/{claim}/{RUNS_FILE}" for claim in self._tables)
        outcome = f"Nothing was recorded. With --record, the records go to {places}, and all pages are rendered."
        if self._folder is not None:
            for record in itertools.chain.from_iterable(records.values()):
                append_record(self._folder / RUNS_FILE, without_places(record))
            outcome = f"Added to {self._folder / RUNS_FILE}."
        elif self._is_recorded:
            for claim, made in records.items():
                add_records(claim, made)
            write_pages()
            outcome = f"Added to {places}; all pages are rendered."
        print(outcome, file=sys.stderr, flush=True)

    def publish_record(self, record: Record) -> None:
        """Publish the only record of a study, in each of its claims."""
        self.publish({claim: [record] for claim in self._tables})


def track(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Yield the items; show on standard error how many are done and the time left.

    A terminal has a bar. Elsewhere there is a line every ten seconds, and one at the end.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
        with Progress(*columns, console=console, transient=True) as progress:
            yield from progress.track(items, description=what)
        return
    started = last = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - last >= _LINE_SECONDS or done == len(items):
            left = (now - started) / done * (len(items) - done)
            print(f"{done}/{len(items)}  {left:.0f} s left  {what}", file=sys.stderr, flush=True)
            last = now
