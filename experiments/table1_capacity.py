"""What fits: the models of the paper's Table 1, planned; the largest that fits; measured where there is a GPU.

    python experiments/table1_capacity.py

Plans all ten columns with float32 and 12 bytes a parameter on the paper's accelerators, cut by the paper's rule (least
variance of FLOPs) and by memory; finds the largest model for each K; adds a record to reproductions/table1_model_size/
and renders its README. With a GPU it then measures the columns (capacity_on_gpu.py) and adds a second record. About six
minutes on two cores, most of them for the search.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from table1_columns import COLUMNS, Column, describe, loss

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
    layers, device = column.layers(), find_device(column.device)

    def profile(size: int) -> list[LayerProfile]:
        return profile_layers(layers, loss, column.batch(size))

    return Planner(profile, cut, column.batch_size, device, Speed.of(device, "float32", EFFICIENCY))


def plan(column: Column) -> dict[str, Any]:
    """Return a column of the table: parameters, and the memory of each device with each cut."""
    cuts = {}
    for name, cut in CUTS.items():
        found = planner_of(column, cut).forecast(column.setting)
        partitions = [stage.last_layer - stage.first_layer + 1 for stage in found.stages]
        cuts[name] = {"partitions": partitions, "devices": [asdict(memory) for memory in found.memory]}
    counts = {"parameters": sum(parameter.numel() for parameter in column.layers().parameters())}
    if column.family == "amoebanet":
        public = column.layers(as_public_code=True)
        counts["parameters_with_auxiliary_head"] = sum(parameter.numel() for parameter in public.parameters())
    room = find_device(column.device).memory_bytes
    return {**describe(column), **counts, "memory_bytes": room, "cuts": cuts}


def find_largest(column: Column) -> dict[str, Any]:
    """Return the size of the largest model that fits the column's devices, with each cut.

    AmoebaNet's D in steps of 16, at the column's L; the Transformer's L.
    """
    found = {}
    for name, cut in CUTS.items():
        size = largest(_fits(column, cut), *((16, 16) if column.num_filters else (column.num_stages, 1)))
        found[name] = size
    return {**describe(column), "largest": found}


def _fits(column: Column, cut: Cut) -> Callable[[int], bool]:
    def fits(size: int) -> bool:
        model = replace(column, num_filters=size) if column.num_filters else replace(column, num_layers=size)
        return planner_of(model, cut).fits(column.setting)

    return fits


def main() -> None:
    """Plan, search, and measure where there is a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan-only", action="store_true", help="search and measure nothing")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"columns": [plan(column) for column in COLUMNS]}
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
