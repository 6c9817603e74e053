"""Plan which models of the paper's Table 1 fit, find the largest that fits, and measure on a GPU if there is one.

    python -m experiments.table1_capacity

Plans all ten columns with float32 and 12 bytes per parameter on the paper's accelerators, cut by the paper's rule
(least variance of FLOPs) and by memory. Plans some with other choices (variants.py). Finds the largest model for each
K. Adds a record to reproductions/table1_model_size/ and renders all pages. With a GPU, it then measures the columns
(on_gpu.py) and adds a second record. Ten minutes on two cores, mostly for the search.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from experiments.table1_capacity.columns import COLUMNS
from experiments.table1_capacity.plans import CUTS, find_largest, plan
from experiments.table1_capacity.variants import VARIANTS, vary
from gpipe.records import make_record
from reproductions.additions import add_record

FOLDER = "table1_model_size"


def main() -> None:
    """Plan, search, and measure if there is a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan-only", action="store_true", help="neither search nor measure")
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "columns": [plan(column) for column in COLUMNS],
        "variants": [vary(variant, CUTS) for variant in VARIANTS],
    }
    if not arguments.plan_only:
        results["search"] = [find_largest(column) for column in COLUMNS if not column.name.startswith("Naive")]
    record = make_record(kind="planned", experiment="table1_capacity", config={}, seed=0, results=results)
    add_record(FOLDER, record)
    if torch.cuda.is_available() and not arguments.plan_only:
        from experiments.table1_capacity.on_gpu import measure_columns

        add_record(FOLDER, measure_columns(COLUMNS))


if __name__ == "__main__":
    main()
