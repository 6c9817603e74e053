"""The programs of Table 1: its models, and what they plan, find and measure of smaller ones."""

from functools import cache
from inspect import signature
from typing import Any

import pytest

from experiments.planned_memory.stage_accounting import ProcessorAllocator
from experiments.table1_capacity import plans
from experiments.table1_capacity.columns import COLUMNS, SMALL_COLUMNS, Column
from experiments.table1_capacity.on_gpu import measure
from experiments.table1_capacity.plans import CUTS, count_parameters, find_largest, plan
from experiments.table1_capacity.variants import Variant, vary
from gpipe.records import Record, make_record
from reproductions.table1_model_size.tables import TABLES

IMAGES, TEXT = SMALL_COLUMNS


@cache
def measured(column: Column) -> dict[str, Any]:
    return measure(column, "cpu", ProcessorAllocator())


def test_the_columns_have_the_papers_models() -> None:
    assert [(column.name, count_parameters(column)) for column in COLUMNS] == [
        ("Naive-1", 81_137_437),
        ("Pipeline-1", 317_541_696),
        ("Pipeline-2", 540_196_240),
        ("Pipeline-4", 1_053_293_776),
        ("Pipeline-8", 1_842_610_248),
        ("Naive-1", 282_178_816),
        ("Pipeline-1", 785_761_536),
        ("Pipeline-8", 5_318_006_016),
        ("Pipeline-32", 21_029_786_880),
        ("Pipeline-128", 83_876_910_336),
    ]


def test_naive_is_one_micro_batch_whose_activations_are_kept() -> None:
    settings = {column.name: column.setting for column in COLUMNS}
    assert (settings["Naive-1"].num_microbatches, settings["Naive-1"].rematerialize) == (1, "never")
    assert (settings["Pipeline-8"].num_microbatches, settings["Pipeline-8"].rematerialize) == (32, "always")
    assert all(column.setting.num_stages == column.num_stages for column in COLUMNS)


@pytest.mark.parametrize(("column", "stages"), [(IMAGES, [0, 1]), (TEXT, [0, 2, 3])], ids=["amoebanet", "transformer"])
def test_what_a_stage_holds_is_measured_beside_its_plan(column: Column, stages: list[int]) -> None:
    found = measured(column)
    assert found["stages"] == stages and found["fits"]
    assert found["planned_bytes"] == pytest.approx(found["peak_bytes"], rel=0.1)


def test_the_largest_model_is_found_for_each_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dict(zip(CUTS.values(), (40, 8), strict=True))
    monkeypatch.setattr(plans, "_make_check", lambda column, cut: lambda size: size <= limits[cut])
    found = find_largest(IMAGES)
    assert found["largest"] == {"variance of FLOPs": 32, "memory": None}
    assert found["parameters"] == {"variance of FLOPs": count_parameters(IMAGES), "memory": None}
    assert find_largest(TEXT)["largest"] == {"variance of FLOPs": 40, "memory": 8}


def test_attention_op_by_op_needs_more_memory_and_smaller_micro_batches_less() -> None:
    column = Column("Pipeline-1", 2, None, 1, is_small=True)
    variants = [Variant(column, 2), Variant(column, 2, is_fused=False), Variant(column, 4, is_fused=False)]
    fused, op_by_op, smaller = (vary(variant, CUTS)["activation_bytes"]["memory"] for variant in variants)
    assert fused < op_by_op > smaller


def written(kind: str, **results: Any) -> Record:
    return make_record(kind=kind, command="c", experiment="table1_capacity", config={}, seed=0, results=results)


def test_the_tables_read_what_the_programs_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_make_check", lambda column, cut: lambda size: size <= 32)
    planned = written(
        "planned", columns=[plan(IMAGES)], search=[find_largest(IMAGES)], variants=[vary(Variant(IMAGES, 4), CUTS)]
    )
    paper = {"family": "amoebanet", "name": "Pipeline-2", "num_layers": "3", "num_filters": "32", "num_stages": "2"}
    paper |= {"parameters": "9.99M", "parameter_gb": "1", "activation_gb": "2"}
    paper |= dict.fromkeys(("torchgpipe_parameters", "torchgpipe_parameter_gib", "torchgpipe_activation_gib"), "")
    records = [planned, written("measured", columns=[measured(IMAGES)])]
    untried = paper | {"name": "Pipeline-4"}  # is left out
    tables = {
        table.__name__: table(records, [paper, untried]) for table in TABLES if "paper" in signature(table).parameters
    }
    assert all(len(table.splitlines()) == 2 + (2 if name == "table1_measured" else 1) for name, table in tables.items())
    assert f"{count_parameters(IMAGES):,}" in tables["table1_parameters"]
    assert tables["table1_devices"].count("fits") == 3
