"""Speed-ups over K stages and M micro-batches, of a planned or simulated grid and of measured runs."""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from gpipe.records import Record
from reproductions.paper_scale import Differences, paper_scale
from reproductions.paper_scale import differences as settings_that_differ
from reproductions.table import (
    Paper,
    newest,
)

Key = tuple[str, int, int]
"""(a model's title, K, M)"""

# Of conf/experiment/table2_throughput.yaml: micro-batches if mini-batches grow with M, or equal mini-batches.
MICROBATCH_SIZE = 4
EQUAL_BATCH_SIZE = 128
TOLERANCE = 0.2  # of the paper's number: what is near it
_EXPERIMENTS = {"amoebanet": "table2_amoebanet_d", "transformer_lm": "table2_transformer_lm"}
SLOW_LINKS = "table3_slow_links"
# What its page adds to the commands of Table 2: the paper's P100s have no units for bfloat16.
_SLOW_LINKS = {"amoebanet": "model.num_filters=128", "transformer_lm": "model.num_layers=24"}


def key_of(row: Mapping[str, str]) -> Key:
    """Return the cell of a row of paper.csv."""
    return row["title"], int(row["num_stages"]), int(row["num_microbatches"])


def divide_by_base(speeds: Mapping[Key, float], paper: Paper) -> dict[Key, float]:
    """Return speeds over that of the paper's base, for each model that has it."""
    bases: dict[str, Key] = {}
    for row in paper:
        bases.setdefault(row["title"], key_of(row))
    return {key: speed / speeds[bases[key[0]]] for key, speed in speeds.items() if bases.get(key[0]) in speeds}


def find_grid(records: Iterable[Record], experiment: str, kind: str) -> list[dict[str, Any]]:
    """Return the models of the newest grid of "planned" or "simulated" numbers, if there is one."""
    found = find_grid_record(records, experiment, kind)
    return [] if found is None else list(found.results["models"])


def find_grid_record(records: Iterable[Record], experiment: str, kind: str) -> Record | None:
    """Return the record of that grid, if there is one."""
    return newest((record for record in records if record.kind == kind), experiment)


def grid_speeds(models: Iterable[Mapping[str, Any]], batch: str, cut_by: str = "seconds") -> dict[Key, float]:
    """Return the examples per second of the cells with this choice of micro-batches and balance of partitions."""
    return {
        (model["model"], cell["num_stages"], cell["num_microbatches"]): cell["examples_per_second"]
        for model in models
        for cell in model["cells"]
        if (cell["batch"], cell["cut_by"]) == (batch, cut_by)
    }


def measured_runs(records: Iterable[Record], experiment: str, batch: str) -> dict[Key, list[Record]]:
    """Return the runs of each cell on the newest machine, the newest of each seed: seeds repeat a measurement.

    They have "fixed" micro-batches or "equal" mini-batches. A run counts for both if both have the same mini-batch.
    """
    runs = [run for run in records if run.kind == "measured" and run.experiment == experiment]
    runs = sorted((run for run in runs if _has_batch(run, batch)), key=lambda run: run.date)
    last = {(cell_of(run), run.seed): run for run in runs if run.hardware == runs[-1].hardware}
    cells: dict[Key, list[Record]] = {}
    for (cell, _), run in sorted(last.items(), key=lambda item: item[0]):
        cells.setdefault(cell, []).append(run)
    return cells


def median_speed(runs: Iterable[Record]) -> float | None:
    """Return the median of the runs' examples per second, None if no run has measured them."""
    speeds = [speed for run in runs if (speed := run.examples_per_second) is not None]
    return median(speeds) if speeds else None


def compute_law(num_stages: int, num_microbatches: int) -> float:
    """Return the speed-up over one stage that K equal stages allow, recomputing while they wait.

    A step takes (M+K-1) F + M (R+B) + (K-1) B. With R = F and B = 2F that is (4M+3K-3) F / K per stage.
    """
    k, m = num_stages, num_microbatches
    return 4 * k * m / (4 * m + 3 * k - 3)


def measured_speeds(records: Iterable[Record], experiment: str, batch: str, paper: Paper) -> dict[Key, float]:
    """Return the measured examples per second of the runs with the paper-scale settings, under the paper's titles."""
    titles = {row["model"]: row["title"] for row in paper}
    speeds: dict[Key, float] = {}
    counting = paper_scale(records, [experiment], held_against(paper))
    for (family, num_stages, num_microbatches), runs in measured_runs(counting, experiment, batch).items():
        if (speed := median_speed(runs)) is not None:
            speeds[titles[family], num_stages, num_microbatches] = speed
    return speeds


def held_against(paper: Paper) -> Differences:
    """Return what compares a run with the paper-scale one of its cell, with micro-batches of 4 or equal mini-batches.

    A run of no cell of the paper is compared with the first one of its model.
    """
    cells: dict[str, list[tuple[int, int]]] = {}
    for row in paper:
        cells.setdefault(row["model"], []).append((int(row["num_stages"]), int(row["num_microbatches"])))

    def differences(run: Record) -> list[str]:
        family, *cell = cell_of(run)
        if family not in cells:
            return [f"model.family: {family} (paper scale: {' or '.join(cells)})"]
        num_stages, num_microbatches = tuple(cell) if tuple(cell) in cells[family] else cells[family][0]
        command = [f"+experiment={_EXPERIMENTS[family]}"]
        command += [f"pipeline.num_stages={num_stages}", f"pipeline.num_microbatches={num_microbatches}"]
        if run.experiment == SLOW_LINKS:
            command += [f"name={SLOW_LINKS}", _SLOW_LINKS[family], "trainer.autocast=none"]
        if _has_batch(run, "equal"):
            command.append(f"trainer.batch_size={EQUAL_BATCH_SIZE}")
        return settings_that_differ(run, command, launched_alike=True)

    return differences


def _has_batch(run: Record, batch: str) -> bool:
    size, num_microbatches = run.config["trainer"]["batch_size"], run.config["pipeline"]["num_microbatches"]
    expected: int = MICROBATCH_SIZE * num_microbatches if batch == "fixed" else EQUAL_BATCH_SIZE
    return bool(size == expected)


def cell_of(run: Record) -> Key:
    """Return the cell of a run; its model is the family's name."""
    pipeline = run.config["pipeline"]
    return run.config["model"]["family"], pipeline["num_stages"], pipeline["num_microbatches"]


def count_near(speed_ups: Mapping[Key, float], paper: Paper) -> str:
    """Say how many of the compared numbers are within 20 % of the paper's; nothing where there is no speed-up."""
    rows = compared_rows(paper)
    near = sum(abs(speed_ups.get(key_of(row), 0) / float(row["speed_up"]) - 1) <= TOLERANCE for row in rows)
    return f"{near} of {len(rows)}" if speed_ups else ""


def compared_rows(paper: Paper) -> list[Mapping[str, str]]:
    """Return the rows to compare: not those that are the base of the speed-ups, which are 1 by definition."""
    return [row for row in paper if float(row["speed_up"]) != 1]
