"""Table 1: what is planned and what is measured beside the paper's, and what fits."""

from pathlib import Path
from typing import Any

import pytest

from gpipe.records import Record, make_record, read_records
from reproductions.table1_model_size.planned_memory import (
    planned_memory,
    planned_memory_deviations,
    planned_memory_strangers,
)
from reproductions.table1_model_size.tables import (
    as_printed,
    table1_devices,
    table1_measured,
    table1_memory,
    table1_parameters,
    table1_search,
    table1_variants,
)
from tests.reproductions.translation_records import cells

ROOT = Path(__file__).parents[2] / "reproductions"
GIB = 2**30
IMAGES = {
    "family": "amoebanet",
    "name": "Pipeline-2",
    "num_layers": "18",
    "num_filters": "544",
    "num_stages": "2",
    "parameters": "82M",
    "parameter_gb": "6.45",
    "activation_gb": "8.11",
    "torchgpipe_parameters": "542.7M",
    "torchgpipe_parameter_gib": "6.07",
    "torchgpipe_activation_gib": "3.39",
}
TEXT = dict.fromkeys(IMAGES, "") | {
    "family": "transformer",
    "name": "Pipeline-8",
    "num_layers": "103",
    "num_stages": "8",
    "parameters": "5.3B",
    "parameter_gb": "59.5",
    "activation_gb": "50.9",
}
PAPER = [IMAGES, TEXT]


def record(kind: str, **results: Any) -> Record:
    return make_record(kind=kind, command="c", experiment="table1_capacity", config={}, seed=0, results=results)


def devices(*peaks: float) -> dict[str, Any]:
    """Return devices of 1 GiB of parameters; activations are the rest of their peaks."""
    sizes = [(GIB, int((peak - 1) * GIB), int(peak * GIB)) for peak in peaks]
    names = ("parameter_bytes", "activation_bytes", "peak_bytes")
    return {"devices": [dict(zip(names, size, strict=True)) for size in sizes]}


def column(paper: dict[str, str], parameters: int, **more: Any) -> dict[str, Any]:
    cuts = {"variance of FLOPs": devices(8.5, 2), "memory": devices(5, 6)}
    of = {"family": paper["family"], "name": paper["name"]}
    return {**of, "parameters": parameters, "memory_bytes": 8 * GIB, "cuts": cuts, **more}


def columns(with_head: int = 81_785_166) -> list[dict[str, Any]]:
    return [column(IMAGES, 81_137_437, parameters_with_auxiliary_head=with_head), column(TEXT, 5_318_006_016)]


@pytest.mark.parametrize(
    ("count", "printed"), [(81_785_166, "82M"), (282_178_816, "282.2M"), (1_053_293_776, "1.05B"), (1842610248, "1.8B")]
)
def test_a_count_is_printed_as_the_paper_does(count: int, printed: str) -> None:
    assert as_printed(count, printed) == printed


def test_the_count_that_rounds_to_the_papers_is_named() -> None:
    images, text = cells(table1_parameters([record("planned", columns=columns())], PAPER))
    assert images[:3] == ["Pipeline-2: AmoebaNet-D (18,544)", "82M", "542.7M"]
    assert images[3:] == ["81,137,437", "81M", "81,785,166", "82M", "with head"]
    assert text == ["Pipeline-8: Transformer-103", "5.3B", "", "5,318,006,016", "5.3B", "", "", "the model"]
    (neither, _) = cells(table1_parameters([record("planned", columns=columns(with_head=84_000_000))], PAPER))
    assert neither[-1] == "neither"


def test_memory_is_added_up_over_the_devices() -> None:
    images, text = cells(table1_memory([record("planned", columns=columns())], PAPER))
    assert images[1:] == ["6.45", "6.07", "2.00", "8.11", "3.39", "8.50", "9.00"]
    assert text[1:] == ["59.5", "", "2.00", "50.9", "", "8.50", "9.00"]


def test_other_choices_stand_beside_the_papers_activations() -> None:
    images = {"family": "amoebanet", "name": "Pipeline-2", "num_microbatches": 128, "attention": None}
    text = {"family": "transformer", "name": "Pipeline-8", "num_microbatches": 16, "attention": "op by op"}
    cuts = [{"variance of FLOPs": size * GIB, "memory": GIB} for size in (3, 2)]
    sizes = [{"activation_bytes": found, "peak_bytes": found} for found in cuts]
    variants = [{**text, **sizes[0]}, {**images, **sizes[1]}]
    rows = cells(table1_variants([record("planned", variants=variants)], PAPER))
    assert [row[1:] for row in rows] == [
        ["128", "", "8.11", "3.39", *["2.00", "1.00"] * 2],
        ["16", "op by op", "50.9", "", *["3.00", "1.00"] * 2],
    ]


def test_the_fullest_device_says_whether_a_model_fits() -> None:
    planned = record("planned", columns=columns())
    expected = ["8", "8.50", "does not fit", "6.00", "fits"]
    assert [row[1:] for row in cells(table1_devices([planned], PAPER))] == [[*expected, "not run", ""]] * 2
    measured = [
        {"family": "amoebanet", "name": "Pipeline-2", "memory_bytes": 8 * GIB, "peak_bytes": [5 * GIB, 9 * GIB]},
        {"family": "transformer", "name": "Pipeline-8", "memory_bytes": 8 * GIB, "out_of_memory": "no room"},
    ]
    rows = cells(table1_devices([planned, record("measured", columns=measured)], PAPER))
    assert [row[-2:] for row in rows] == [["9.00", "does not fit"], ["out of memory", "does not fit"]]


def test_each_measured_stage_stands_beside_its_plan() -> None:
    both = {"stages": [0, 1], "partitions": [16, 8], "planned_bytes": [5 * GIB, 4 * GIB]}
    measured = [
        {**both, "family": "amoebanet", "name": "Pipeline-2", "peak_bytes": [6 * GIB, 3 * GIB]},
        {**both, "family": "transformer", "name": "Pipeline-8", "out_of_memory": "no room"},
    ]
    rows = cells(table1_measured([record("measured", columns=measured)], PAPER))
    assert [row[1:] for row in rows[:2]] == [["0", "16", "5.00", "6.00"], ["1", "8", "4.00", "3.00"]]
    assert [row[-1] for row in rows[2:]] == ["no room"] * 2


def test_the_largest_model_has_a_verdict_beside_the_papers() -> None:
    both = {"family": "amoebanet", "name": "Pipeline-2"}
    sizes = {"largest": {"variance of FLOPs": 528, "memory": 736}}
    sizes |= {"parameters": {"variance of FLOPs": 509_000_000, "memory": 988_000_000}}
    (row,) = cells(table1_search([record("planned", search=[{**both, **sizes}])], PAPER))
    assert row[:4] == ["AmoebaNet-D (18,D)", "2", "544", "82M"]
    assert row[4:] == ["528", "0.51B", "no", "736", "0.99B", "yes"]
    nothing = {key: {"variance of FLOPs": None, "memory": None} for key in ("largest", "parameters")}
    (row,) = cells(table1_search([record("planned", search=[{**both, **nothing}])], PAPER))
    assert row[4:] == ["none", "", "no"] * 2


def test_plans_of_steps_stand_beside_the_allocators() -> None:
    rows = [
        {"model": "m", "schedule": "gpipe", "rematerialize": "never", "num_stages": len(planned)}
        | {"stages_per_device": 1, "partitions": [3] * len(planned)}
        | {"planned_bytes": planned, "measured_bytes": [2**20] * len(planned)}
        for planned in ([2**20], [2**20 + 2**16, 2**20 - 2**17])
    ]
    results = {"rows": rows, "strangers": rows}
    found = make_record(kind="measured", command="c", experiment="planned_memory", config={}, seed=0, results=results)
    assert cells(planned_memory([found])) == [["m; gpipe, never", "3, 3", "1.1, 0.9", "1.0, 1.0", "-12.5%"]]
    assert cells(planned_memory_deviations([found])) == [
        ["m", "1", "1", "0.0%", "+0.0%", "+0.0%"],
        ["m", "2", "2", "9.4%", "-12.5%", "+6.2%"],
        ["all", "", "3", "6.2%", "-12.5%", "+6.2%"],
    ]
    assert cells(planned_memory_strangers([found])) == [["m", "3", "6.2%", "-12.5%", "+6.2%"]]


def test_the_newest_record_holds_the_plans_to_a_tenth() -> None:
    """Of our models and of at least ten that others wrote, where operations are measured."""
    (*_, newest) = (
        r for r in read_records(ROOT / "table1_model_size" / "runs.jsonl") if r.experiment == "planned_memory"
    )
    assert len({row["model"] for row in newest.results["strangers"]}) >= 10
    for row in newest.results["rows"] + newest.results["strangers"]:
        assert row["planned_bytes"] == pytest.approx(row["measured_bytes"], rel=0.1), row


def test_without_records_the_tables_say_what_to_run() -> None:
    for table in (table1_parameters, table1_memory, table1_devices, table1_search, table1_variants):
        assert table([], PAPER) == "Not run: python -m experiments.table1_capacity.\n"
    assert table1_measured([], PAPER) == "Not run: python -m experiments.table1_capacity on a machine with a GPU.\n"
    assert planned_memory([]) == planned_memory_deviations([]) == "Not run: python -m experiments.planned_memory.\n"
