"""Table 4: means and deviations over the seeds, verdicts, and what was not run."""

from statistics import stdev
from typing import Any

from gpipe.records import Record, make_record
from reproductions.table4_imagenet_and_transfer.tables import (
    claims,
    short_runs,
    table4,
    table4_cost,
    table4_other_settings,
)
from tests.reproductions.paper_scale_records import composed
from tests.reproductions.translation_records import cells

PAPER = [
    {"data": "imagenet", "title": "ImageNet-2012", "train": "1281167", "test": "50000", "classes": "1000",
     "top1": "84.4", "top5": "97.0"},
    {"data": "cifar10", "title": "CIFAR-10", "train": "50000", "test": "10000", "classes": "10", "top1": "99.0",
     "top5": ""},
]  # fmt: skip


def record(
    experiment: str,
    data: str,
    seed: int,
    top1: float | None,
    init_from: str | None = "x",
    rate: float = 0.5,
    **results: Any,
) -> Record:
    figures = results
    if top1 is not None:
        figures = {"top1": top1, "evaluation": {"test": {"top1": top1, "raw_top1": top1 / 2}}}
    config = {"data": {"name": data}, "init_from": init_from, "optimizer": {"learning_rate": rate}}
    kind = "not run" if top1 is None else "measured"
    return make_record(kind=kind, command="c", experiment=experiment, config=config, seed=seed, results=figures)


def transfer(seed: int, top1: float, init_from: str | None = "x") -> Record:
    return composed("+experiment=transfer_table", "data=cifar10", seed=seed, init_from=init_from, top1=top1)


def test_the_mean_and_deviation_over_the_seeds_stand_beside_the_papers_number() -> None:
    records = [transfer(seed, top1) for seed, top1 in enumerate((0.98, 0.99, 1.0))]
    imagenet, top5, cifar = cells(table4(records, PAPER))
    sizes = ["1,281,167", "50,000", "1,000"]
    assert imagenet == ["ImageNet-2012", *sizes, "84.4%", "", "", "0", "not run"]
    assert top5 == ["ImageNet-2012, top-5", *sizes, "97.0%", "", "", "0", "not run"]
    deviation = f"{stdev((0.98, 0.99, 1.0)):.2%}"
    assert cifar[:-1] == ["CIFAR-10", "50,000", "10,000", "10", "99.0%", "99.00%", deviation, "3"]
    assert cifar[-1].startswith("no difference found [-"), "three runs that differ so much decide nothing"


def test_the_verdict_follows_from_runs_and_test_images() -> None:
    imagenet = composed("+experiment=amoebanet_imagenet", init_from=None, top1=0.85, top5=0.96)
    runs = [transfer(seed, top1) for seed, top1 in enumerate((0.989, 0.99, 0.991, 0.9895, 0.9905))]
    verdicts = [row[-1] for row in cells(table4([imagenet, *runs], PAPER))]
    assert [verdict.partition(" ")[0] for verdict in verdicts] == ["reproduced", "contradicted", "reproduced"]
    top1, top5, transfers, *_ = claims([imagenet, *runs], PAPER)
    assert (top1.paper, top1.measured, top5.measured) == ("84.4%", "85.00%", "96.00%")
    assert top1.verdict == verdicts[0] and transfers.verdict == "1 of 1 data sets reproduced"


def test_small_models_and_trainings_from_scratch_do_not_count_as_the_papers() -> None:
    records = [
        record("amoebanet_imagenet_laptop", "imagenet", 0, 0.9, None),
        record("transfer_table_laptop", "cifar10", 0, 0.9),
        transfer(0, 0.9, None),
        composed("+experiment=amoebanet_imagenet", "data=cifar10", top1=0.9),
    ]
    assert [row[-2:] for row in cells(table4(records, PAPER))] == [["0", "not run"]] * 3
    assert [row[-1].partition(":")[0] for row in cells(table4_other_settings(records))] == ["init_from", "data.name"]


def test_the_newest_reason_for_not_running_is_told() -> None:
    records = [record("transfer_table_laptop", "cifar10", 0, None, reason="data missing")]
    assert cells(table4(records, PAPER))[-1][-1] == "not run: data missing"


def test_short_runs_are_shown_by_their_length_and_by_their_statistics() -> None:
    def short(steps: int, num_batches: int | None, seed: int, top1: float) -> Record:
        run = record("short_runs_laptop", "digits", seed, top1)
        run.config["trainer"] = {"max_steps": steps, "evaluation": {"statistics_batches": num_batches}}
        return run

    rows = cells(
        short_runs([short(50, 8, 0, 0.5), short(16, 8, 0, 0.25), short(16, None, 0, 0.5), short(16, 8, 1, 0.75)])
    )
    deviation, half = f"{stdev((0.25, 0.75)):.2%}", f"{stdev((0.125, 0.375)):.2%}"
    assert rows == [
        ["16", "moving averages", "50.00%", "", "25.00%", "", "1"],
        ["16", "of 8 mini-batches", "50.00%", deviation, "25.00%", half, "2"],
        ["50", "of 8 mini-batches", "50.00%", "", "25.00%", "", "1"],
    ]


def test_without_records_the_tables_say_what_to_run() -> None:
    assert short_runs([]) == "Not run: train.py -m +experiment=short_runs_laptop.\n"
    assert table4_cost([]) == "Not run: python -m experiments.table4_cost.\n"
