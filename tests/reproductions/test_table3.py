"""Table 3: speed-ups over K = 2."""

from gpipe.records import Record, make_record
from reproductions import ROOT
from reproductions.pages import read_paper
from reproductions.table3_slow_links.tables import GRID, SPEED_UPS, table3
from tests.reproductions.paper_scale_records import composed
from tests.reproductions.translation_records import cells

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


def test_speed_ups_are_over_two_stages() -> None:
    records = [grid("planned", "fits", 2.0, 4.0, 6.6), grid("simulated", "fits", 5.0, 9.0, 15.0)]
    found = cells(table3(records, PAPER))
    assert found[1] == ["T", "4", "32", "1.8", "2.00", "+11%", "", "", "1.80", "+0%", "", ""]
    assert found[2][4:6] == ["3.30", "+0%"] and found[2][8:10] == ["3.00", "-9%"]


def test_what_nobody_measured_is_not_run() -> None:
    found = cells(SPEED_UPS.fixed([grid("simulated", "fixed", 5.0, 9.0, 15.0)], PAPER))
    assert [line[4:] for line in found] == [["", "1.00", "not run"], ["", "1.80", "not run"], ["", "3.00", "not run"]]


def test_runs_of_the_pages_commands_count_and_others_stand_among_other_settings() -> None:
    paper = read_paper(ROOT / "reproductions" / "table3_slow_links")
    shared = "name=table3_slow_links", "pipeline.num_microbatches=32", "trainer.autocast=none"
    models = ("table2_amoebanet_d", "model.num_filters=128"), ("table2_transformer_lm", "model.num_layers=24")
    runs = [
        composed(f"+experiment={name}", size, *shared, f"pipeline.num_stages={k}", examples_per_second=10.0 * k)
        for name, size in models
        for k in (2, 4)
    ]
    assert [line[-1] for line in cells(SPEED_UPS.fixed(runs, paper))] == ["1.00", "2.00", "not run"] * 2
    assert SPEED_UPS.other_settings(runs, paper) == "Other settings under a paper-scale name: no run.\n"
    narrow = composed("+experiment=table2_amoebanet_d", "model.num_filters=64", *shared)
    (row,) = cells(SPEED_UPS.other_settings([narrow], paper))
    assert row[-1] == "model.num_filters: 64 (paper scale: 128)"
