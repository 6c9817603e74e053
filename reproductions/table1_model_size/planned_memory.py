"""The tables of planned memory beside the allocator's, from the record of python -m experiments.planned_memory."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from gpipe.records import Record
from reproductions.study import Study
from reproductions.table import markdown, write_table

PLANNED_MEMORY = Study("planned_memory")


@PLANNED_MEMORY.table
def planned_memory(record: Record) -> str:
    """Return planned and measured peaks in MiB, for the runs with the most stages."""
    rows = record.results["rows"]
    most = max(row["num_stages"] for row in rows)
    columns = {
        "model; schedule, recomputation": lambda row: f"{row['model']}; {row['schedule']}, {row['rematerialize']}",
        "layers of each stage": lambda row: ", ".join(map(str, row["partitions"])),
        "planned": lambda row: _mebibytes(row["planned_bytes"]),
        "measured": lambda row: _mebibytes(row["measured_bytes"]),
        "largest deviation": lambda row: f"{max(_deviations(row), key=abs):+z.1%}",
    }
    return write_table((row for row in rows if row["num_stages"] == most), columns)


@PLANNED_MEMORY.table
def planned_memory_deviations(record: Record) -> str:
    """Return how far the plans of all runs are from the measurement, one row per model and number of stages."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for row in record.results["rows"]:
        stages = f"{row['num_stages']}, two per device" if row["stages_per_device"] == 2 else str(row["num_stages"])
        groups.setdefault((row["model"], stages), []).extend(_deviations(row))
    groups["all", ""] = [deviation for found in groups.values() for deviation in found]
    return _spread(["model", "K"], groups)


@PLANNED_MEMORY.table
def planned_memory_strangers(record: Record) -> str:
    """Return how far the plans of models that are not ours are from the measurement, one row per model."""
    return _spread(["model"], _group_deviations(record.results["strangers"], "planned_bytes"))


@PLANNED_MEMORY.table
def planned_memory_described(record: Record) -> str:
    """Return the same of plans that measure no operation, ours as one model."""
    rows = [*record.results["rows"], *record.results["strangers"]]
    return _spread(["model"], _group_deviations(rows, "described_bytes"))


def _group_deviations(rows: Sequence[Mapping[str, Any]], planned: str) -> dict[tuple[str, ...], list[float]]:
    groups: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        groups.setdefault((row["model"],), []).extend(_deviations(row, planned))
    return groups


def _spread(header: Sequence[str], groups: Mapping[tuple[str, ...], Sequence[float]]) -> str:
    """Return a table of deviations, one row per group."""
    rows = [
        [*names, len(found), f"{median(map(abs, found)):.1%}", f"{min(found):+z.1%}", f"{max(found):+z.1%}"]
        for names, found in groups.items()
    ]
    return markdown([*header, "devices measured", "median, absolute", "furthest below", "furthest above"], rows)


def _deviations(row: Mapping[str, Any], planned: str = "planned_bytes") -> list[float]:
    """Return each stage's (planned - measured) / measured peak."""
    peaks = zip(row[planned], row["measured_bytes"], strict=True)
    return [planned / measured - 1 for planned, measured in peaks]


def _mebibytes(sizes: Sequence[int]) -> str:
    return ", ".join(f"{size / 2**20:.1f}" for size in sizes)
