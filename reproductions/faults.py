"""The tables of faults: what the tests in tests/reliability observed.

GPIPE_FAULT_RECORDS=$PWD/faults.jsonl make reliability   each test of a fault writes a line
python -m reproductions faults faults.jsonl              turns these lines into the record, and renders
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpipe.records import Record
from reproductions.study import Study
from reproductions.table import markdown, write_table

RECORDS = Path("tests/reliability/runs.jsonl")
_COMMAND = "make reliability"
_PLACES = ("forward", "backward", "loading", "worker", "evaluation", "save", "log")
_FAULTS = {
    "raise": "an error is raised",
    "kill": "SIGKILL",
    "exit": "exit(0)",
    "hang": "hangs",
    "stop": "SIGSTOP",
    "memory": "MemoryError",
    "allocate": "memory runs out",
    "full disk": "the disk is full",
}
_WHERE = {"loading": "loading data", "worker": "a worker that loads data", "log": "metrics.jsonl"}
FAULTS = Study("faults", _COMMAND)


@FAULTS.table
def faults(record: Record) -> str:
    """Return, for each fault and place, how long until all had exited, what the user saw, and what was lost."""
    ordered = sorted(record.results["rows"], key=lambda row: (list(_FAULTS).index(row["fault"]), _get_order(row)))
    columns = {
        "fault": lambda row: _FAULTS[row["fault"]],
        "in": lambda row: _WHERE.get(row["place"], row["place"]),
        "stage": lambda row: row["stage"],
        "all exited after, s": lambda row: f"{row['seconds']:.1f}",
        "what the user sees": _quote,
        "lost": lambda row: _describe_lost([row]),
    }
    return write_table(ordered, columns)


@FAULTS.table
def faults_in_short(record: Record) -> str:
    """Return the same in one row per fault and time-out: places, seconds, one message, and the least and most lost."""
    groups: dict[tuple[int, float], list[dict[str, Any]]] = {}
    for row in sorted(record.results["rows"], key=_get_order):
        groups.setdefault((list(_FAULTS).index(row["fault"]), row["timeout_seconds"]), []).append(row)
    rows = []
    for (fault, timeout), group in sorted(groups.items()):
        name = list(_FAULTS.values())[fault]
        seconds = [row["seconds"] for row in group]
        places = ", ".join(dict.fromkeys(_WHERE.get(row["place"], row["place"]) for row in group))
        middle, most = f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"
        rows.append([name, places, f"{timeout:g}", f"{middle} ({most})", _quote(group[0]), _describe_lost(group)])
    header = ["fault", "tried in", "time-out, s", "all exited after, s: median (max)", "what the user sees"]
    return markdown([*header, "lost: min to max"], rows)


def read_record(path: Path) -> Record:
    """Return the record of what the tests wrote.

    Raises:
        ValueError: The table does not know a fault or a place.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if row["fault"] not in _FAULTS or row["place"] not in _PLACES:
            raise ValueError(f"{path} has the fault {row['fault']!r} in {row['place']!r}: add both to the table.")
    config = {"num_stages": 3, "save_every_steps": 2}
    return replace(FAULTS.make_record(config, {"rows": rows}), command=_COMMAND)


def _quote(row: Mapping[str, Any]) -> str:
    return f"`{row['said'].replace('|', '/')}`"


def _get_order(row: Mapping[str, Any]) -> tuple[int, str]:
    return _PLACES.index(row["place"]), row["stage"]


def _describe_lost(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say what was lost, least to most: the finished steps since the last checkpoint, and the one under way."""
    losses = sorted({(row["steps_done"] - row["steps_saved"], row["steps_done"]) for row in rows})
    ends = " to ".join(f"{lost} of {done}" for lost, done in dict.fromkeys((losses[0], losses[-1])))
    saved = " or ".join(map(str, sorted({row["steps_saved"] for row in rows})))
    return f"{ends} steps, back to step {saved}"


TABLES = FAULTS.tables
