"""The bubble's claim: what a stage waits, beside the simulated and the planned bubble of the same K and M."""

from dataclasses import replace

from gpipe.records import Record, make_record
from reproductions.bubble.overheads import HAND_WRITTEN, engine_overhead
from reproductions.bubble.tables import bubble_on_gpus, claims
from reproductions.claims import NO_TEST
from reproductions.table2_throughput.tables import GRID

SETTING = {"num_stages": 8, "num_microbatches": 32}


def measured(*, rematerialize: str = "always", step_seconds: float = 1.0) -> Record:
    row = {"engine": "ours", "rematerialize": rematerialize, "forward_seconds": 0.004, "backward_seconds": 0.008}
    results = {"grid": [row | SETTING | {"step_seconds": step_seconds}, row | SETTING | {"num_stages": 2}]}
    return make_record(kind="measured", command="c", experiment="engine_overhead", config={}, seed=0, results=results)


def grid(kind: str, bubble: float) -> Record:
    cell = {"batch": "fits", "cut_by": "seconds", "shares": {"bubble": bubble}}
    cells = [cell | SETTING, cell | SETTING | {"num_microbatches": 4}, cell | SETTING | {"cut_by": "flops"}]
    models = [{"model": "Transformer-48", "cells": cells}, {"model": "AmoebaNet-D (18,256)", "cells": cells}]
    return make_record(kind=kind, command="c", experiment=GRID, config={}, seed=0, results={"models": models})


def test_each_kind_has_its_column_and_the_formula_is_not_called_the_papers_number() -> None:
    (claim,) = claims([measured(step_seconds=0.64), grid("simulated", 0.125), grid("planned", 0.25)], [])
    assert (claim.paper, claim.measured) == ("negligible", "layers that sleep: 20.0%")  # 32 x 16 ms of 640
    assert claim.simulated == "Transformer-48: 12.5% without imbalance"
    assert claim.planned == "Transformer-48: 25.0% without imbalance; (K-1)/(M+K-1) is 17.9%"
    assert claim.verdict == NO_TEST


def test_the_newest_measurement_stands_beside_the_range_of_all() -> None:
    records = [measured(step_seconds=0.64), measured(step_seconds=0.8), measured(rematerialize="never")]
    dates = ("2020-01-02T00:00:00+00:00", "2020-01-01T00:00:00+00:00", "2019-01-01T00:00:00+00:00")
    (claim,) = claims([replace(each, date=date) for each, date in zip(records, dates, strict=True)], [])
    assert claim.measured == "layers that sleep: 20.0% (20.0% to 36.0% in 2 records)"


def test_the_share_of_the_loop_is_that_of_the_same_machine() -> None:
    setting = {"rematerialize": "never", "forward_seconds": 0.004, "backward_seconds": 0.008, "formula_seconds": 0.4}
    engines = {"ours": 0.5, HAND_WRITTEN: 0.45}
    grid = [setting | SETTING | {"engine": engine, "step_seconds": step} for engine, step in engines.items()]
    busy = [row | {"step_seconds": 2 * row["step_seconds"]} for row in grid[1:]]
    record = measured()
    record = replace(record, results={"grid": grid, "busy_grid": [grid[0] | {"step_seconds": 1.0}, *busy]})
    _, _, *rows = engine_overhead([record]).splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row]
    assert [(row[0], row[1], row[-4], row[-1]) for row in cells] == [
        ("ours, never", "idle", "0.800", "0.900"),
        (f"{HAND_WRITTEN}, never", "idle", "0.889", "1.000"),
        ("ours, never", "busy", "0.400", "0.900"),
        (f"{HAND_WRITTEN}, never", "busy", "0.444", "1.000"),
    ]


def test_steps_that_recompute_stand_beside_a_simulated_step_that_recomputes_early() -> None:
    record = measured(step_seconds=0.745)
    del record.results["grid"][1:]
    record.results["grid"][0]["formula_seconds"] = 0.624
    slept = {"forward_seconds": 0.004, "backward_seconds": 0.008}
    row = engine_overhead([replace(record, config=slept)]).splitlines()[2]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[6:10] == ["624.0", "0.838", "596.0", "0.800"]  # (4 x 32 + 3 x 8 - 3) x 4 ms
    record.results["grid"][0]["rematerialize"] = "never"
    assert engine_overhead([record]).splitlines()[2].endswith("| 0.838 |  |  |  |")


def test_without_records_it_was_not_run() -> None:
    (claim,) = claims([measured(rematerialize="never")], [])
    assert (claim.measured, claim.simulated, claim.planned) == ("not run", "", "(K-1)/(M+K-1) is 17.9%")


def step(num_stages: int, num_microbatches: int, bubble: float | None, kind: str = "measured") -> Record:
    pipeline = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    config = {"model": {"family": "transformer_lm", "num_layers": 48}, "pipeline": pipeline}
    return make_record(kind=kind, command="c", experiment="bubble", config=config, seed=0, results={"bubble": bubble})


def test_steps_on_gpus_are_sorted_and_stand_beside_the_formula() -> None:
    records = [step(8, 32, 0.19), step(2, 8, 0.125), step(4, 8, None), step(4, 32, None, "not run"), measured()]
    *_, first, second = bubble_on_gpus(records).splitlines()
    assert first == "| Transformer-48 | 2 | 8 | 11.1% | 12.5% |"
    assert second == "| Transformer-48 | 8 | 32 | 17.9% | 19.0% |"
    assert bubble_on_gpus(records[2:]).startswith("Not run: make gpu")
