"""What fits: the models of the paper's Table 1, planned; the largest that fits; measured where there is a GPU.

    python experiments/table1_capacity.py

Plans all ten columns with float32 and 12 bytes a parameter on the paper's accelerators, cut by the paper's rule (least
variance of FLOPs) and by memory, and some with other choices (table1_variants.py); finds the largest model for each K;
adds a record to reproductions/table1_model_size/ and renders its README. With a GPU it then measures the columns
(capacity_on_gpu.py) and adds a second record. About ten minutes on two cores, most of them for the search.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from table1_columns import COLUMNS, Column, describe, loss
from table1_variants import VARIANTS, vary

from gpipe.pipeline.partition import partition_layers
from gpipe.planning.cut import partition_by_memory
from gpipe.planning.device import find_device
from gpipe.planning.forecast import Setting
from gpipe.planning.planner import Cut, Planner, largest
from gpipe.planning.profile import LayerProfile, profile_layers
from gpipe.planning.speed import Speed
from gpipe.results.records import make_record
from gpipe.results.reproduction import add_record

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "table1_model_size"
COMMAND = "python experiments/table1_capacity.py"
EFFICIENCY = 0.5  # of the planned seconds; no figure of this table depends on it


def by_variance(profiles: Sequence[LayerProfile], setting: Setting) -> list[int]:
    """Cut as the paper does: least variance of the stages' FLOPs."""
    flops = [sum(work.flops for work in profile.forward) for profile in profiles[:-1]]
    return partition_layers(flops, setting.num_stages, objective="variance")


CUTS: dict[str, Cut] = {"variance of FLOPs": by_variance, "memory": partition_by_memory}


def planner_of(column: Column, cut: Cut) -> Planner:
    """Return what plans a column on the paper's accelerators."""
    device = find_device(column.device)
    speed = Speed.of(device, "float32", EFFICIENCY)
    return Planner(partial(profile, column), cut, column.batch_size, device, speed)


@cache  # both cuts ask
def profile(column: Column, size: int) -> list[LayerProfile]:
    """Describe a column's layers with micro-batches of a size."""
    return profile_layers(column.layers(), loss, column.batch(size))


def plan(column: Column) -> dict[str, Any]:
    """Return a column of the table: parameters, and the memory of each device with each cut."""
    cuts = {}
    for name, cut in CUTS.items():
        found = planner_of(column, cut).forecast(column.setting)
        partitions = [stage.last_layer - stage.first_layer + 1 for stage in found.stages]
        cuts[name] = {"partitions": partitions, "devices": [asdict(memory) for memory in found.memory]}
    counts = {"parameters": num_parameters(column)}
    if column.family == "amoebanet":
        counts["parameters_with_auxiliary_head"] = num_parameters(column, as_public_code=True)
    room = find_device(column.device).memory_bytes
    return {**describe(column), **counts, "memory_bytes": room, "cuts": cuts}


def num_parameters(column: Column, *, as_public_code: bool = False) -> int:
    """Count a column's parameters; `as_public_code`: with an auxiliary head and 1001 classes."""
    return sum(parameter.numel() for parameter in column.layers(as_public_code=as_public_code).parameters())


def find_largest(column: Column) -> dict[str, Any]:
    """Return the size of the largest model that fits the column's devices, and its parameters, with each cut.

    AmoebaNet's D in steps of 16, at the column's L; the Transformer's L.
    """
    start, step = (16, 16) if column.num_filters else (column.num_stages, 1)
    sizes = {name: largest(_fits(column, cut), start, step) for name, cut in CUTS.items()}
    counts = {name: None if size is None else num_parameters(resized(column, size)) for name, size in sizes.items()}
    return {**describe(column), "largest": sizes, "parameters": counts}


def resized(column: Column, size: int) -> Column:
    """Return the column with another D, or the Transformer with another L."""
    return replace(column, num_filters=size) if column.num_filters else replace(column, num_layers=size)


def _fits(column: Column, cut: Cut) -> Callable[[int], bool]:
    return lambda size: planner_of(resized(column, size), cut).fits(column.setting)


def main() -> None:
    """Plan, search, and measure where there is a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan-only", action="store_true", help="search and measure nothing")
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "columns": [plan(column) for column in COLUMNS],
        "variants": [vary(variant, CUTS) for variant in VARIANTS],
    }
    if not arguments.plan_only:
        results["search"] = [find_largest(column) for column in COLUMNS if not column.name.startswith("Naive")]
    record = make_record(
        kind="planned", command=COMMAND, experiment="table1_capacity", config={}, seed=0, results=results
    )
    add_record(ROOT, FOLDER, record)
    if torch.cuda.is_available() and not arguments.plan_only:
        from capacity_on_gpu import measure_columns

        add_record(ROOT, FOLDER, measure_columns(COLUMNS, COMMAND))


if __name__ == "__main__":
    main()
