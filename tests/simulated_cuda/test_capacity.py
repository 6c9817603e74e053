"""The capacity of a GPU is measured as planned; where its memory runs out, that is the result."""

import re
from functools import cache
from typing import Any

import pytest

from experiments.table1_capacity.columns import SMALL_COLUMNS, Column
from tests.simulated_cuda.capacity import measure_with
from tests.simulated_cuda.machine import Machine

IMAGES, _ = SMALL_COLUMNS


@cache
def measure_without_limit(machine: Machine, column: Column) -> dict[str, Any]:
    (found,) = machine.run(1, measure_with, column, None)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("column", SMALL_COLUMNS, ids=lambda column: column.family)
def test_a_gpu_holds_what_was_planned(column: Column, simulated: Machine) -> None:
    found = measure_without_limit(simulated, column)
    assert found["fits"]
    assert found["planned_bytes"] == pytest.approx(found["peak_bytes"], rel=0.15)


@pytest.mark.parametrize(
    ("share", "place"),
    [
        (0.9, r"stage \d, micro-batch \d, .*, \w+: OutOfMemoryError: CUDA out of memory\. Tried to allocate \d+ bytes"),
        (0.01, r"CUDA out of memory\. Tried to allocate \d+ bytes"),  # the weights have no room
    ],
)
def test_a_gpu_whose_memory_runs_out_is_a_result(share: float, place: str, simulated: Machine) -> None:
    memory_bytes = int(share * max(measure_without_limit(simulated, IMAGES)["peak_bytes"]))
    (found,) = simulated.run(1, measure_with, IMAGES, memory_bytes)
    assert re.match(place, found["out_of_memory"]), found
    assert "peak_bytes" not in found and "fits" not in found


def test_a_column_leaves_the_memory_to_the_next_one(simulated: Machine) -> None:
    assert measure_without_limit(simulated, IMAGES)["left_bytes"] == 0
