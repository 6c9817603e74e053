"""Tables of our engine beside its peers, from the record that python -m experiments.peers makes."""

from collections.abc import Iterable
from typing import Any

from gpipe.records import Record
from reproductions.study import Study
from reproductions.table import format_value, markdown, write_table

OURS = "ours"
_SETTING = ("model", "num_stages", "num_microbatches")
Row = dict[str, Any]
PEERS = Study("peers")


@PEERS.table
def peers_throughput(record: Record) -> str:
    """Return one row per model, K and M: each engine's examples per second, and how far ours is ahead."""
    grid = record.results["grid"]
    engines = _engines(grid)
    peers = [name for name in engines if name != OURS]
    rows = [
        [
            *_setting(cell),
            *(format_value(cell[name].get("examples_per_second"), ".1f") or cell[name]["outcome"] for name in engines),
            *(format_value(cell[name].get("ours_over_this"), ".2f") for name in peers),
        ]
        for cell in _cells(grid)
    ]
    ratios = [f"ours / {name}, median of pairs" for name in peers]
    return markdown(["model", "K", "M", *(f"{name}, examples/s" for name in engines), *ratios], rows)


@PEERS.table
def peers_speed_up(record: Record) -> str:
    """Return each engine's speed-up with K stages over one stage."""
    grid = record.results["grid"]
    engines = _engines(grid)
    speeds = {
        (row["model"], row["num_stages"], row["num_microbatches"], row["engine"]): row.get("examples_per_second")
        for row in grid
    }
    rows = []
    for cell in _cells(grid):
        model, num_stages, num_microbatches = (cell[OURS][name] for name in _SETTING)
        if num_stages == 1:
            continue
        pairs = [
            (speeds[model, num_stages, num_microbatches, name], speeds.get((model, 1, num_microbatches, name)))
            for name in engines
        ]
        rows.append(
            [*_setting(cell), *(format_value(many / one if many and one else None, ".2f") for many, one in pairs)]
        )
    return markdown(["model", "K", "M", *(f"{name}: relative to K = 1" for name in engines)], rows)


@PEERS.table
def peers_memory(record: Record) -> str:
    """Return the growth of each engine's largest process."""
    grid = record.results["grid"]
    engines = _engines(grid)
    rows = [
        [*_setting(cell), *(format_value(cell[name].get("peak_memory_bytes"), ".0f", 2**-20) for name in engines)]
        for cell in _cells(grid)
    ]
    return markdown(["model", "K", "M", *(f"{name}, MiB" for name in engines)], rows)


@PEERS.table
def peers_partitions(record: Record) -> str:
    """Return how each package cuts the models, and its slowest stage over the optimum."""
    columns = {
        "model": lambda row: row["model"],
        "K": lambda row: row["num_stages"],
        "chosen by": lambda row: row["chosen_by"],
        "layers of each stage": lambda row: ", ".join(map(str, row["partitions"] or ["not run"])),
        "slowest stage / optimum": lambda row: format_value(row["slowest_over_optimum"], ".2f"),
    }
    return write_table(record.results["partitions"], columns)


def _cells(grid: Iterable[Row]) -> list[dict[str, Row]]:
    """Return the engines' rows of each setting, in the order of the record."""
    cells: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in grid:
        cells.setdefault(tuple(row[name] for name in _SETTING), {})[row["engine"]] = row
    return list(cells.values())


def _engines(grid: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["engine"] for row in grid))


def _setting(cell: dict[str, Row]) -> list[object]:
    return [cell[OURS][name] for name in _SETTING]
