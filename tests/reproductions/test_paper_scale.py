"""A run stands beside the paper's numbers by its settings; under the name alone it stands among other settings."""

from inspect import signature
from types import ModuleType
from typing import Any

import pytest

from reproductions.figure3_multilingual import tables as figure3
from reproductions.pages import read_paper
from reproductions.paper_scale import differences
from reproductions.table import make_table
from reproductions.table2_throughput import tables as table2
from reproductions.table4_imagenet_and_transfer import tables as table4
from reproductions.table5_batch_size import tables as table5
from tests.reproductions.paper_scale_records import composed
from tests.reproductions.test_pages import ROOT
from tests.reproductions.translation_records import cells

EXPERIMENTS = ("amoebanet_imagenet", "transfer", "batch_size", "transformer_multilingual", "table2_throughput")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_run_of_the_experiment_as_it_is_has_no_difference(experiment: str) -> None:
    assert differences(composed(f"+experiment={experiment}", seed=3), [f"+experiment={experiment}"]) == []


def test_seed_weights_and_where_it_runs_may_differ() -> None:
    elsewhere = ("launch.num_replicas=2", "launch.device=cpu", "data.root=/elsewhere", "tracking=disabled")
    run = composed("+experiment=transfer", *elsewhere, seed=7, init_from="another")
    assert differences(run, ["+experiment=transfer"]) == []


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("model.num_layers=3", "model.num_layers: 3 (paper scale: 18)"),
        ("data.image_size=32", "data.image_size: 32 (paper scale: 480)"),
        ("pipeline.num_stages=2", "pipeline.num_stages: 2 (paper scale: 4)"),
        ("trainer.autocast=none", "trainer.autocast: none (paper scale: bfloat16)"),
        ("name=mine", "name: mine (paper scale: amoebanet_imagenet)"),
    ],
)
def test_every_other_setting_is_a_difference(override: str, difference: str) -> None:
    assert differences(composed("+experiment=amoebanet_imagenet", override), ["+experiment=amoebanet_imagenet"]) == [
        difference
    ]


def test_a_setting_that_one_of_both_lacks_is_a_difference() -> None:
    run = composed("+experiment=amoebanet_imagenet")
    del run.config["ema"]
    run.config["model"]["extra"] = 1
    ema, _, extra = differences(run, ["+experiment=amoebanet_imagenet"])
    assert ema == "ema.decay: absent (paper scale: 0.9999)" and extra == "model.extra: 1 (paper scale: absent)"


def test_an_experiment_that_conf_does_not_have_says_so() -> None:
    (text,) = differences(composed("+experiment=transfer"), ["+experiment=nowhere"])
    assert text.startswith("+experiment=nowhere init_from=null does not compose")


SMALL = ("model.num_layers=3", "model.num_filters=8", "data.image_size=32", "trainer.max_steps=1")


@pytest.mark.parametrize(
    ("page", "name", "overrides", "results"),
    [
        (table4, "transfer", ("data=fgvc_aircraft", *SMALL), {"top1": 0.0099}),
        (table4, "amoebanet_imagenet", SMALL, {"top1": 0.9, "top5": 0.99}),
        (table4, "transfer_table", ("data=cifar10",), {"init_from": None, "top1": 0.99}),
        (table2, "table2_throughput", ("model.num_layers=3",), {"examples_per_second": 9.0}),
        (table5, "batch_size", ("model.num_layers=1",), {"evaluation": {"valid": {"loss": 0.1}}}),
        (figure3, "transformer_multilingual", ("model.num_layers=1",), {"evaluation": {"valid": {}}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_smuggled_in_under_a_paper_scale_name_stands_among_other_settings(
    page: ModuleType, name: str, overrides: tuple[str, ...], results: dict[str, Any]
) -> None:
    smuggled = composed(f"+experiment={name}", *overrides, **results)
    folder = {table4: "table4_imagenet_and_transfer", table2: "table2_throughput", table5: "table5_batch_size"}
    paper = read_paper(ROOT / "reproductions" / folder.get(page, "figure3_multilingual"))
    (other,) = (table for table in page.TABLES if table.__name__.endswith("_other_settings"))
    (row,) = cells(make_table(other, [smuggled], paper))
    assert row[0] == smuggled.experiment and "paper scale" in row[-1]
    for table in page.TABLES:
        if "paper" in signature(table).parameters and table is not other:
            assert table([smuggled], paper) == table([], paper)
    assert page.claims([smuggled], paper) == page.claims([], paper)


def test_another_experiment_has_no_place_in_the_table_of_other_settings() -> None:
    found = table4.table4_other_settings([composed("+experiment=amoebanet_fashion_mnist", top1=0.9)])
    assert found == "Other settings under a paper-scale name: no run.\n"
