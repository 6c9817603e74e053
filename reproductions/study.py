"""A study of which a page shows the newest record: its tables, and where that record comes from."""

from collections.abc import Callable, Sequence
from functools import wraps

from gpipe.records import Record
from reproductions.table import Table, newest, not_run, provenance


class Study:
    """A program that measures or computes something, and records all of it at once.

    Args:
        experiment: the name that its records have.
        program: what makes a record, for tables that have none; by default the program of that name.
    """

    def __init__(self, experiment: str, program: str | None = None) -> None:
        self._experiment = experiment
        self._program = program or f"python -m experiments.{experiment}"

    def table(self, build: Callable[[Record], str]) -> Table:
        """Make a table of all records of what builds one of the newest record; without one it says what to run."""

        @wraps(build)
        def of_newest(records: Sequence[Record]) -> str:
            record = newest(records, self._experiment)
            return not_run(self._program) if record is None else build(record)

        return of_newest

    def run(self) -> Table:
        """Return the table of the command, the date and the hardware of the newest record: <experiment>_run."""

        def of_newest(records: Sequence[Record]) -> str:
            return provenance(newest(records, self._experiment), self._program)

        of_newest.__name__ = f"{self._experiment}_run"
        return of_newest
