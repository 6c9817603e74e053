"""A study's tables show its newest record; without one they say what to run."""

from dataclasses import replace

from gpipe.records import Record
from reproductions.study import Study

STUDY = Study("cost")


@STUDY.table
def cost(record: Record) -> str:
    """Return the cost."""
    return f"{record.results['cost']}\n"


def make(number: int, date: str, experiment: str = "cost") -> Record:
    record = Study(experiment).make_record({}, {"cost": number})
    return replace(record, command=f"c{number}", date=date)


RECORDS = [
    make(1, "2026-01-02T00:00:00+00:00"),
    make(2, "2026-01-03T00:00:00+00:00"),
    make(3, "2026-01-01T00:00:00+00:00"),
    make(4, "2026-01-04T00:00:00+00:00", "another"),
]


def test_the_newest_record_of_the_study_is_shown() -> None:
    assert cost(RECORDS) == "2\n"
    assert "| command | `c2` |" in STUDY.run(RECORDS)


def test_without_a_record_a_table_says_what_to_run() -> None:
    assert cost(RECORDS[3:]) == STUDY.run([]) == "Not run: python -m experiments.cost.\n"
    assert Study("cost", "make cost").run([]) == "Not run: make cost.\n"


def test_tables_are_found_by_their_names() -> None:
    assert [table.__name__ for table in STUDY.tables] == ["cost", "cost_run"]
