"""The tables of our engine beside its peers."""

from collections.abc import Callable
from typing import Any

import pytest

from gpipe.records import Record
from reproductions.table2_throughput.peers import (
    PEERS,
    peers_memory,
    peers_partitions,
    peers_speed_up,
    peers_throughput,
)
from tests.reproductions.translation_records import cells

SPEEDS = {("ours", 1): 10.0, ("torch", 1): 8.0, ("ours", 2): 18.0, ("torch", 2): 12.0}
NOT_RUN = "not run: 4 stages need 4 cores, here: 2"


def record() -> Record:
    grid: list[dict[str, Any]] = [
        {
            "model": "A",
            "num_stages": num_stages,
            "num_microbatches": 4,
            "engine": engine,
            "outcome": "measured",
            "examples_per_second": speed,
            "ours_over_this": SPEEDS["ours", num_stages] / speed,
            "peak_memory_bytes": num_stages * 2**20,
        }
        for (engine, num_stages), speed in SPEEDS.items()
    ]
    fixed = {"model": "A", "num_stages": 4, "num_microbatches": 4, "outcome": NOT_RUN}
    grid += [fixed | {"engine": engine} for engine in ("ours", "torch")]
    choices = [
        {"model": "A", "num_stages": 2, "chosen_by": "x", "partitions": [1, 3], "slowest_over_optimum": 1.25},
        {"model": "A", "num_stages": 2, "chosen_by": "y", "partitions": None, "slowest_over_optimum": None},
    ]
    return PEERS.make_record({}, {"grid": grid, "partitions": choices})


def test_the_engines_stand_side_by_side_with_ours_over_each_peer() -> None:
    assert cells(peers_throughput([record()])) == [
        ["A", "1", "4", "10.0", "8.0", "1.25"],
        ["A", "2", "4", "18.0", "12.0", "1.50"],
        ["A", "4", "4", NOT_RUN, NOT_RUN, ""],
    ]


def test_each_engine_is_compared_with_its_own_single_stage() -> None:
    assert cells(peers_speed_up([record()])) == [["A", "2", "4", "1.80", "1.50"], ["A", "4", "4", "", ""]]


def test_memory_is_that_of_the_fullest_process() -> None:
    assert cells(peers_memory([record()]))[:2] == [["A", "1", "4", "1", "1"], ["A", "2", "4", "2", "2"]]


def test_a_partition_that_was_not_chosen_says_so() -> None:
    assert cells(peers_partitions([record()])) == [
        ["A", "2", "x", "1, 3", "1.25"],
        ["A", "2", "y", "not run", ""],
    ]


@pytest.mark.parametrize("table", PEERS.tables, ids=lambda table: table.__name__)
def test_without_a_record_a_table_says_so(table: Callable[[list[Record]], str]) -> None:
    assert table([]) == "Not run: python -m experiments.peers.\n"
