"""A study whose newest record is shown on a page: its tables, and the provenance of the record."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from gpipe.records import Record, make_record
from reproductions.table import Table, name_table, newest, not_run, provenance


class Study:
    """A program that measures or computes something, and writes all of it into one record.

    Args:
        experiment: the name of its records.
        program: the command to show if there is no record; by default the program of that name.
    """

    def __init__(self, experiment: str, program: str | None = None) -> None:
        self.experiment = experiment
        self._program = program or f"python -m experiments.{experiment}"
        self._tables: list[Table] = []

    def table(self, build: Callable[[Record], str]) -> Table:
        """Turn a function of the newest record into a table; if there is no record, the table says what to run."""

        @wraps(build)
        def of_newest(records: Sequence[Record]) -> str:
            record = newest(records, self.experiment)
            return not_run(self._program) if record is None else build(record)

        self._tables.append(of_newest)
        return of_newest

    def run(self, records: Sequence[Record]) -> str:
        """Return the command, the date and the hardware of the newest record."""
        return provenance(newest(records, self.experiment), self._program)

    @property
    def tables(self) -> list[Table]:
        """All tables; the last one is `run`, named <experiment>_run."""
        return [*self._tables, name_table(f"{self.experiment}_run", self.run)]

    def make_record(
        self, config: Mapping[str, Any], results: Mapping[str, Any], kind: str = "measured", gpus: Sequence[str] = ()
    ) -> Record:
        """Return the record of what this process has measured or computed."""
        return make_record(kind=kind, experiment=self.experiment, config=config, seed=0, results=results, gpus=gpus)
