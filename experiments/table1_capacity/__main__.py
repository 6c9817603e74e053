"""Plan which models of the paper's Table 1 fit, find the largest that fits, and measure on a GPU if there is one.

    python -m experiments.table1_capacity

Plans all ten columns with float32 and 12 bytes per parameter on the paper's accelerators, cut by the paper's rule
(least variance of FLOPs) and by memory. Plans some with other choices (variants.py). Finds the largest model for each
K. With a GPU, it then measures the columns (on_gpu.py). Ten minutes on two cores, mostly for the search.
--measure-only runs only the last part, in a few minutes on an H100.
"""

from collections.abc import Sequence
from typing import Any

import torch

from experiments.program import StudyProgram, track
from experiments.table1_capacity.columns import COLUMNS, SMALL_COLUMNS, Column
from experiments.table1_capacity.plans import CUTS, find_largest, plan
from experiments.table1_capacity.variants import VARIANTS, vary
from gpipe.records import Record, make_record
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
    has_gpu = torch.cuda.is_available()
    program = StudyProgram(__doc__, {CLAIM: [*PLANNED, *MEASURED] if has_gpu else PLANNED})
    program.parser.add_argument("--plan-only", action="store_true", help="neither search nor measure")
    program.parser.add_argument("--measure-only", action="store_true", help="neither plan nor search")
    program.parser.add_argument("--small", action="store_true", help="take tiny models")
    options = program.parse()
    if options.small:
        program.require_folder("--small only tries the program")
    if options.measure_only and (options.plan_only or not has_gpu):
        program.parser.error("--measure-only needs a GPU, and no --plan-only.")
    columns = SMALL_COLUMNS if options.small else COLUMNS
    records = [] if options.measure_only else [plan_columns(columns, searches=not options.plan_only)]
    if has_gpu and not options.plan_only:
        from experiments.table1_capacity.on_gpu import measure_columns

        records.append(measure_columns(track(columns, "columns measured")))
    program.publish({CLAIM: records})


def plan_columns(columns: Sequence[Column], *, searches: bool) -> Record:
    """Return the record of all plans, and of the largest models if they are searched for."""
    results: dict[str, Any] = {
        "columns": [plan(column) for column in track(columns, "columns planned")],
        "variants": [vary(variant, CUTS) for variant in track(VARIANTS, "variants planned")],
    }
    if searches:
        searched = [column for column in columns if not column.name.startswith("Naive")]
        results["search"] = [find_largest(column) for column in track(searched, "largest models found")]
    return make_record(kind="planned", experiment="table1_capacity", config={}, seed=0, results=results)


if __name__ == "__main__":
    main()
