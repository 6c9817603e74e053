"""Planned memory beside what the allocator gave, stage by stage, of small models on the CPU."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from gpipe.results.records import Record
from gpipe.results.tables import markdown, named, not_run, provenance

EXPERIMENT = "planned_memory"


def planned_memory(records: Sequence[Record]) -> str:
    """Return planned and measured peaks in MiB, for the runs with the most stages."""
    record = newest(records)
    if record is None:
        return not_run("experiments/planned_memory.py")
    rows = record.results["rows"]
    most = max(row["num_stages"] for row in rows)
    shown = [
        [
            f"{row['model']}; {row['schedule']}, {row['rematerialize']}",
            ", ".join(map(str, row["partitions"])),
            _mebibytes(row["planned_bytes"]),
            _mebibytes(row["measured_bytes"]),
            f"{max(_deviations(row), key=abs):+z.1%}",
        ]
        for row in rows
        if row["num_stages"] == most
    ]
    header = ["model; schedule, recomputation", "layers of each stage", "planned", "measured", "largest deviation"]
    return markdown(header, shown)


def planned_memory_deviations(records: Sequence[Record]) -> str:
    """Return how far the plans of all runs are from the measurement, a row a model and number of stages."""
    record = newest(records)
    if record is None:
        return not_run("experiments/planned_memory.py")
    groups: dict[tuple[str, str], list[float]] = {}
    for row in record.results["rows"]:
        groups.setdefault((row["model"], str(row["num_stages"])), []).extend(_deviations(row))
    groups["all", ""] = [deviation for found in groups.values() for deviation in found]
    rows = [
        [model, stages, str(len(found)), f"{median(map(abs, found)):.1%}", f"{min(found):+z.1%}", f"{max(found):+z.1%}"]
        for (model, stages), found in groups.items()
    ]
    return markdown(["model", "K", "stages measured", "median, either way", "furthest below", "furthest above"], rows)


def planned_memory_run(records: Sequence[Record]) -> str:
    """Return where the measurement was made."""
    return provenance(newest(records), "experiments/planned_memory.py")


def newest(records: Sequence[Record]) -> Record | None:
    """Return the latest measurement, None without one."""
    found = [record for record in records if record.experiment == EXPERIMENT]
    return max(found, key=lambda record: record.date, default=None)


def _deviations(row: Mapping[str, Any]) -> list[float]:
    """Return by which fraction of the measured peak each stage's plan is above it."""
    peaks = zip(row["planned_bytes"], row["measured_bytes"], strict=True)
    return [planned / measured - 1 for planned, measured in peaks]


def _mebibytes(sizes: Sequence[int]) -> str:
    return ", ".join(f"{size / 2**20:.1f}" for size in sizes)


TABLES = named(planned_memory, planned_memory_deviations, planned_memory_run)
