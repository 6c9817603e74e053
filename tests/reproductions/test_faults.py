"""The table of faults says what the tests saw."""

import json
from pathlib import Path

import pytest

from gpipe.records import Record, make_record, read_records
from reproductions.__main__ import main
from reproductions.faults import TABLES, faults, faults_in_short, read_record


def row(
    fault: str, place: str, stage: str, seconds: float, done: int = 3, saved: int = 2, timeout: float = 5.0
) -> dict[str, object]:
    return {
        "fault": fault, "place": place, "stage": stage, "seconds": seconds, "timeout_seconds": timeout,
        "said": "rank 1 | stage 1: on purpose", "steps_done": done, "steps_saved": saved,
    }  # fmt: skip


ROWS = [
    row("kill", "save", "last", 4.0, 4),
    row("kill", "forward", "first", 2.04),
    row("raise", "loading", "middle", 1),
]


def record(rows: list[dict[str, object]]) -> Record:
    return make_record(kind="measured", command="c", experiment="faults", config={}, seed=0, results={"rows": rows})


def test_each_fault_and_place_has_a_row_in_the_order_of_a_step() -> None:
    lines = faults([record(ROWS)]).splitlines()[2:]
    said = "`rank 1 / stage 1: on purpose`"
    assert lines == [
        f"| an error is raised | loading data | middle | 1.0 | {said} | 1 of 3 steps, back to step 2 |",
        f"| SIGKILL | forward | first | 2.0 | {said} | 1 of 3 steps, back to step 2 |",
        f"| SIGKILL | save | last | 4.0 | {said} | 2 of 4 steps, back to step 2 |",
    ]


def test_in_short_a_fault_has_a_row_a_time_out_with_the_median_and_the_longest_time() -> None:
    patient = row("kill", "worker", "first", 16.0, timeout=15.0)
    lines = faults_in_short([record([patient, *ROWS])]).splitlines()[2:]
    assert [line.split(" | ")[:4] for line in lines] == [
        ["| an error is raised", "loading data", "5", "1.0 (1.0)"],
        ["| SIGKILL", "forward, save", "5", "3.0 (4.0)"],
        ["| SIGKILL", "a worker that loads data", "15", "16.0 (16.0)"],
    ]


def test_in_short_the_least_and_the_most_that_a_fault_lost_stand_beside_each_other() -> None:
    rows = [
        row("kill", "forward", "first", 1),
        row("kill", "save", "last", 1, 6),
        row("kill", "evaluation", "last", 1, 4),
    ]
    rows += [row("full disk", "log", "first", 1, 0, 0), row("full disk", "save", "last", 1)]
    rows += [row("raise", "forward", "first", 1), row("raise", "backward", "last", 1)]
    lines = faults_in_short([record(rows)]).splitlines()[2:]
    assert [line.split(" | ")[-1] for line in lines] == [
        "1 of 3 steps, back to step 2 |",
        "1 of 3 to 4 of 6 steps, back to step 2 |",
        "0 of 0 to 1 of 3 steps, back to step 0 or 2 |",
    ]


def test_without_a_record_the_tables_say_so() -> None:
    for table in TABLES:
        assert table([]).startswith("Not run: make reliability")


def test_the_program_makes_one_record_and_renders_the_readme(tmp_path: Path) -> None:
    (tmp_path / "tests" / "reliability").mkdir(parents=True)
    (tmp_path / "README.md").write_text("<!-- table: faults_in_short -->\n<!-- end -->\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ROWS))
    for _ in range(2):
        main(["faults", str(tmp_path / "rows.jsonl")], tmp_path)
    (made,) = read_records(tmp_path / "tests" / "reliability" / "runs.jsonl")
    assert made.results["rows"] == ROWS
    assert "| SIGKILL | forward, save | 5 | 3.0 (4.0) |" in (tmp_path / "README.md").read_text()


def test_a_fault_that_the_table_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row("lightning", "save", "last", 1)) + "\n")
    with pytest.raises(ValueError, match="the fault 'lightning' in 'save'"):
        read_record(tmp_path / "rows.jsonl")
