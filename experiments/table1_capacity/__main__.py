"""Plan which models of the paper's Table 1 fit, find the largest that fits, and measure on a GPU if there is one.

    python -m experiments.table1_capacity

Plans all ten columns with float32 and 12 bytes per parameter on the paper's accelerators, cut by the paper's rule
(least variance of FLOPs) and by memory. Plans some with other choices (variants.py). Finds the largest model for each
K. With a GPU, it then measures the columns (on_gpu.py). Ten minutes on two cores, mostly for the search.
"""

from __future__ import annotations

from typing import Any

import torch

from experiments.program import StudyProgram, track
from experiments.table1_capacity.columns import COLUMNS
from experiments.table1_capacity.plans import CUTS, find_largest, plan
from experiments.table1_capacity.variants import VARIANTS, vary
from gpipe.records import make_record
from reproductions.table1_model_size import tables

CLAIM = "table1_model_size"
PLANNED = [
    tables.table1_parameters,
    tables.table1_memory,
    tables.table1_devices,
    tables.table1_search,
    tables.table1_variants,
    tables.table1_run,
]
MEASURED = [tables.table1_measured, tables.table1_measured_run]


def main() -> None:
    """Plan, search, and measure if there is a GPU."""
    is_measured = torch.cuda.is_available()
    program = StudyProgram(__doc__, {CLAIM: [*PLANNED, *MEASURED] if is_measured else PLANNED})
    program.parser.add_argument("--plan-only", action="store_true", help="neither search nor measure")
    options = program.parse()
    results: dict[str, Any] = {
        "columns": [plan(column) for column in track(COLUMNS, "columns planned")],
        "variants": [vary(variant, CUTS) for variant in track(VARIANTS, "variants planned")],
    }
    if not options.plan_only:
        searched = [column for column in COLUMNS if not column.name.startswith("Naive")]
        results["search"] = [find_largest(column) for column in track(searched, "largest models found")]
    records = [make_record(kind="planned", experiment="table1_capacity", config={}, seed=0, results=results)]
    if is_measured and not options.plan_only:
        from experiments.table1_capacity.on_gpu import measure_columns

        records.append(measure_columns(track(COLUMNS, "columns measured")))
    program.publish({CLAIM: records})


if __name__ == "__main__":
    main()
