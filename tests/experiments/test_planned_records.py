"""The newest record of each planned page is what its program plans today: a part of each is planned again.

Numbers that nobody measures go stale unseen when a planner changes. Where a test fails, record the study anew with its
command and `--record`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import schedule_memory
from experiments.loss_cost import WAYS, count
from experiments.table1_capacity import plans
from experiments.table1_capacity.columns import COLUMNS, Column
from experiments.table1_capacity.variants import VARIANTS, vary
from experiments.table2_throughput.__main__ import make_studies
from experiments.table2_throughput.study import TableModel
from gpipe.pipeline.schedule import Rematerialize
from gpipe.planning.planner import Planner
from gpipe.records import read_records

pytestmark = pytest.mark.slow
REPRODUCTIONS = Path(__file__).parents[2] / "reproductions"


def newest_results(claim: str, experiment: str) -> dict[str, Any]:
    """Return the results of the newest planned record of an experiment."""
    records = read_records(REPRODUCTIONS / claim / "runs.jsonl")
    planned = [record for record in records if (record.experiment, record.kind) == (experiment, "planned")]
    return dict(max(planned, key=lambda record: record.date).results)


def as_recorded(results: Any) -> Any:
    """Return results as a record has them; its numbers come back from JSON bit by bit."""
    return json.loads(json.dumps(results))


@pytest.fixture(scope="module")
def studies() -> dict[str, list[TableModel]]:
    return make_studies(is_small=False)


@pytest.mark.parametrize(
    ("table", "place", "num_stages", "num_microbatches", "way"),
    [
        ("table2_throughput", 0, 2, 4, ("fits", "seconds")),
        ("table2_throughput", 0, 8, 32, ("fits", "seconds")),
        ("table2_throughput", 0, 8, 32, ("fits", "flops")),
        ("table2_throughput", 0, 8, 32, ("fixed", "seconds")),
        ("table2_throughput", 1, 8, 32, ("fits", "seconds")),
        ("table3_slow_links", 0, 4, 32, ("fits", "seconds")),
    ],
)
def test_a_cell_of_tables_2_and_3_is_planned_as_on_its_page(
    studies: dict[str, list[TableModel]],
    table: str,
    place: int,
    num_stages: int,
    num_microbatches: int,
    way: tuple[str, str],
) -> None:
    study, model = studies[table][place], newest_results(table, f"{table}_grid")["models"][place]
    found = as_recorded(study.cell(num_stages, num_microbatches, "planned", *way))
    names = "num_stages", "num_microbatches", "batch", "cut_by"
    (recorded,) = (cell for cell in model["cells"] if all(cell[name] == found[name] for name in names))
    assert (study.title, found) == (model["model"], recorded)


@pytest.fixture(scope="module")
def planner() -> Planner:
    column = Column("Transformer-48", schedule_memory.NUM_LAYERS, None, schedule_memory.NUM_DEVICES)
    return plans.make_planner(column, plans.cut_by_variance)


@pytest.mark.parametrize(
    ("schedule", "stages_per_device", "mode"),
    [
        ("gpipe", 1, Rematerialize.ALWAYS),
        ("zb_h1", 1, Rematerialize.ALWAYS),
        ("interleaved_1f1b", 2, Rematerialize.NEVER),
    ],
)
def test_a_schedule_needs_the_memory_and_the_time_of_its_page(
    planner: Planner, schedule: str, stages_per_device: int, mode: Rematerialize
) -> None:
    found = as_recorded(schedule_memory.plan(planner, schedule, stages_per_device, mode))
    assert found in newest_results("bubble", "schedule_memory")["rows"]


@pytest.mark.parametrize("column", [COLUMNS[2], COLUMNS[7]], ids=lambda column: f"{column.family}-{column.name}")
def test_a_column_of_table_1_is_planned_as_on_its_page(column: Column) -> None:
    assert as_recorded(plans.plan(column)) in newest_results("table1_model_size", "table1_capacity")["columns"]


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_moves_the_bytes_of_its_page(way: str) -> None:
    rows = newest_results("table2_throughput", "loss_bytes")["rows"]
    recorded = [row for row in rows if (row["what"], row["dtype"]) == (way, "bfloat16")]
    counts = [as_recorded(count(loss, torch.bfloat16)) for loss in WAYS[way]]
    assert [row | found for row, found in zip(recorded, counts, strict=True)] == recorded


def test_a_variant_of_table_1_is_planned_as_on_its_page() -> None:
    found = as_recorded(vary(VARIANTS[0], plans.CUTS))
    assert found in newest_results("table1_model_size", "table1_capacity")["variants"]
