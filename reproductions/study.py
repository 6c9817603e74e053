"""A study whose newest record is shown on a page: its tables, and the provenance of the record."""

from collections.abc import Callable, Sequence
from functools import wraps

from gpipe.records import Record
from reproductions.table import Table, newest, not_run, provenance


class Study:
    """A program that measures or computes something, and writes all of it into one record.

    Args:
        experiment: the name of its records.
        program: the command to show if there is no record; by default the program of that name.
    """

    def __init__(self, experiment: str, program: str | None = None) -> None:
        self._experiment = experiment
        self._program = program or f"python -m experiments.{experiment}"

    def table(self, build: Callable[[Record], str]) -> Table:
        """Turn a function of the newest record into a table; if there is no record, the table says what to run."""

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
