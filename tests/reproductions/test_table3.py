"""Table 3: speed-ups over K = 2."""

from gpipe.records import Record, make_record
from reproductions.table3_slow_links.tables import GRID, table3, table3_fixed

PAPER = [
    {"model": "transformer_lm", "title": "T", "num_stages": k, "num_microbatches": "32", "speed_up": speed_up}
    for k, speed_up in (("2", "1"), ("4", "1.8"), ("8", "3.3"))
]


def grid(kind: str, batch: str, *speeds: float) -> Record:
    cells = [
        {"num_stages": k, "num_microbatches": 32, "batch": batch, "cut_by": "seconds", "examples_per_second": speed}
        for k, speed in zip((2, 4, 8), speeds, strict=True)
    ]
    results = {"models": [{"model": "T", "cells": cells}]}
    return make_record(kind=kind, command="c", experiment=GRID, config={}, seed=0, results=results)


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()][2:]


def test_speed_ups_are_over_two_stages() -> None:
    records = [grid("planned", "fits", 2.0, 4.0, 6.6), grid("simulated", "fits", 5.0, 9.0, 15.0)]
    found = cells(table3(records, PAPER))
    assert found[1] == ["T", "4", "32", "1.8", "2.00", "+11%", "", "", "1.80", "+0%", "", ""]
    assert found[2][4:6] == ["3.30", "+0%"] and found[2][8:10] == ["3.00", "-9%"]


def test_what_nobody_measured_is_not_run() -> None:
    found = cells(table3_fixed([grid("simulated", "fixed", 5.0, 9.0, 15.0)], PAPER))
    assert [line[4:] for line in found] == [["", "1.00", "not run"], ["", "1.80", "not run"], ["", "3.00", "not run"]]
