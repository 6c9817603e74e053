"""Speed-ups over K stages and M micro-batches: of a planned or simulated grid, and of runs that were measured."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpipe.results.paper_scale import Differences, paper_scale
from gpipe.results.paper_scale import differences as settings_that_differ
from gpipe.results.records import Record

Paper = Sequence[Mapping[str, str]]
"""The rows of paper.csv, each model's first row the one that its speed-ups are counted from."""
Key = tuple[str, int, int]
"""(a model's title, K, M)"""

# The mini-batches of conf/experiment/table2_throughput.yaml: these a micro-batch where they grow with M, or equal ones.
MICROBATCH_SIZE = 4
EQUAL_BATCH_SIZE = 128
_EXPERIMENTS = {"amoebanet": "table2_amoebanet_d", "transformer_lm": "table2_transformer_lm"}


def key_of(row: Mapping[str, str]) -> Key:
    """Return which cell a row of paper.csv is."""
    return row["title"], int(row["num_stages"]), int(row["num_microbatches"])


def over_base(speeds: Mapping[Key, float], paper: Paper) -> dict[Key, float]:
    """Return speeds over that of the paper's base, for each model that has it."""
    bases: dict[str, Key] = {}
    for row in paper:
        bases.setdefault(row["title"], key_of(row))
    return {key: speed / speeds[bases[key[0]]] for key, speed in speeds.items() if bases.get(key[0]) in speeds}


def grid(records: Iterable[Record], experiment: str, kind: str) -> list[dict[str, Any]]:
    """Return the models of the newest grid of "planned" or "simulated" numbers, none where there is none."""
    found = [record for record in records if record.experiment == experiment and record.kind == kind]
    newest = max(found, key=lambda record: record.date, default=None)
    return [] if newest is None else list(newest.results["models"])


def grid_speeds(models: Iterable[Mapping[str, Any]], batch: str, cut_by: str = "seconds") -> dict[Key, float]:
    """Return examples a second, by how micro-batches were chosen and what the partitions balance."""
    return {
        (model["model"], cell["num_stages"], cell["num_microbatches"]): cell["examples_per_second"]
        for model in models
        for cell in model["cells"]
        if (cell["batch"], cell["cut_by"]) == (batch, cut_by)
    }


def measured_runs(records: Iterable[Record], experiment: str, batch: str) -> list[Record]:
    """Return the newest run of each cell, on the machine of the newest: with "fixed" micro-batches, or "equal" ones.

    Where both have the same mini-batch a run is of both.
    """
    runs = [run for run in records if run.kind == "measured" and run.experiment == experiment]
    runs = sorted((run for run in runs if _has_batch(run, batch)), key=lambda run: run.date)
    newest = {_cell(run): run for run in runs if run.hardware == runs[-1].hardware}
    return [newest[cell] for cell in sorted(newest)]


def measured_speeds(records: Iterable[Record], experiment: str, batch: str, paper: Paper) -> dict[Key, float]:
    """Return the measured examples per second of the runs with the paper-scale settings, under the paper's titles."""
    titles = {row["model"]: row["title"] for row in paper}
    speeds: dict[Key, float] = {}
    counting = paper_scale(records, [experiment], held_against(paper))
    for run in measured_runs(counting, experiment, batch):
        family, num_stages, num_microbatches = _cell(run)
        if (speed := run.examples_per_second) is not None:
            speeds[titles[family], num_stages, num_microbatches] = speed
    return speeds


def held_against(paper: Paper) -> Differences:
    """Return what holds a run against the paper-scale one of its cell: with micro-batches of 4, or equal mini-batches.

    A run of no cell of the paper is held against its model's first one.
    """
    cells: dict[str, list[tuple[int, int]]] = {}
    for row in paper:
        cells.setdefault(row["model"], []).append((int(row["num_stages"]), int(row["num_microbatches"])))

    def differences(run: Record) -> list[str]:
        family, *cell = _cell(run)
        if family not in cells:
            return [f"model.family: {family} (paper scale: {' or '.join(cells)})"]
        num_stages, num_microbatches = tuple(cell) if tuple(cell) in cells[family] else cells[family][0]
        command = [f"+experiment={_EXPERIMENTS[family]}"]
        command += [f"pipeline.num_stages={num_stages}", f"pipeline.num_microbatches={num_microbatches}"]
        if _has_batch(run, "equal"):
            command.append(f"trainer.batch_size={EQUAL_BATCH_SIZE}")
        return settings_that_differ(run, command, launched_alike=True)

    return differences


def _has_batch(run: Record, batch: str) -> bool:
    size, num_microbatches = run.config["trainer"]["batch_size"], run.config["pipeline"]["num_microbatches"]
    expected: int = MICROBATCH_SIZE * num_microbatches if batch == "fixed" else EQUAL_BATCH_SIZE
    return bool(size == expected)


def _cell(run: Record) -> Key:
    pipeline = run.config["pipeline"]
    return run.config["model"]["family"], pipeline["num_stages"], pipeline["num_microbatches"]
