"""Table 4: means and deviations over the seeds, verdicts, and what was not run."""

from statistics import stdev
from typing import Any

from gpipe.results.records import Record, make_record
from gpipe.results.table4 import table4, table4_cost, transfer_laptop

PAPER = [
    {
        "data": "imagenet",
        "title": "ImageNet-2012",
        "train": "1281167",
        "test": "50000",
        "classes": "1000",
        "top1": "84.4",
    },
    {"data": "cifar10", "title": "CIFAR-10", "train": "50000", "test": "10000", "classes": "10", "top1": "99.0"},
]


def record(
    experiment: str,
    data: str,
    seed: int,
    top1: float | None,
    init_from: str | None = "x",
    rate: float = 0.5,
    **results: Any,
) -> Record:
    figures = results if top1 is None else {"top1": top1}
    config = {"data": {"name": data}, "init_from": init_from, "optimizer": {"learning_rate": rate}}
    kind = "not run" if top1 is None else "measured"
    return make_record(kind=kind, command="c", experiment=experiment, config=config, seed=seed, results=figures)


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()][2:]


def test_the_mean_and_deviation_over_the_seeds_stand_beside_the_papers_number() -> None:
    records = [record("transfer_table", "cifar10", seed, top1) for seed, top1 in enumerate((0.98, 0.99, 1.0))]
    imagenet, cifar = cells(table4(records, PAPER))
    assert imagenet == ["ImageNet-2012", "1,281,167", "50,000", "1,000", "84.4%", "", "", "0", "not run"]
    deviation = f"{stdev((0.98, 0.99, 1.0)):.2%}"
    assert cifar == ["CIFAR-10", "50,000", "10,000", "10", "99.0%", "99.00%", deviation, "3", "reproduced"]


def test_what_falls_short_of_the_paper_is_not_reproduced() -> None:
    records = [record("amoebanet_imagenet", "imagenet", 0, 0.838, None), record("transfer", "cifar10", 0, 0.9851)]
    assert [row[-1] for row in cells(table4(records, PAPER))] == ["not reproduced", "reproduced"]


def test_small_models_and_trainings_from_scratch_do_not_count_as_the_papers() -> None:
    records = [
        record("amoebanet_imagenet_laptop", "imagenet", 0, 0.9, None),
        record("transfer_table_laptop", "cifar10", 0, 0.9),
        record("transfer_table", "cifar10", 0, 0.9, None),
    ]
    assert [row[-2:] for row in cells(table4(records, PAPER))] == [["0", "not run"]] * 2


def test_the_newest_reason_for_not_running_is_told() -> None:
    records = [record("transfer_table_laptop", "cifar10", 0, None, reason="data missing")]
    assert cells(table4(records, PAPER))[1][-1] == "not run: data missing"


def test_fine_tuned_stands_beside_from_scratch_seed_by_seed() -> None:
    records = [
        record("transfer_table_laptop", data, seed, top1 + gain * (init_from is not None), init_from)
        for data, gain in (("digits", 0.0625), ("mnist_5k", -0.0625))
        for seed, top1 in ((0, 0.5), (1, 0.75))
        for init_from in (None, "x")
    ]
    records.append(record("transfer_laptop", "digits", 7, 1.0))  # has no partner: no gain
    digits, mnist = cells(transfer_laptop(records))
    assert digits[:5] == ["digits", "0.5", "62.50%", f"{stdev((0.5, 0.75)):.2%}", "2"]
    assert digits[5] == "79.17%" and digits[7:] == ["3", "+6.25 (+6.25)", "it helps"]
    assert mnist[-2:] == ["-6.25 (-6.25)", "it does not help"]


def test_each_learning_rate_has_a_row() -> None:
    records = [
        record("transfer_laptop", "digits", 0, rate + gain, init_from, rate=rate)
        for rate in (0.25, 0.125)
        for init_from, gain in ((None, 0), ("x", 0.5))
    ]
    rows = cells(transfer_laptop(records))
    assert [(row[1], row[2], row[5]) for row in rows] == [("0.125", "12.50%", "62.50%"), ("0.25", "25.00%", "75.00%")]


def test_without_records_the_tables_say_what_to_run() -> None:
    assert transfer_laptop([]) == "Not run: train.py -m +experiment=transfer_table scale=laptop.\n"
    assert table4_cost([]) == "Not run: experiments/table4_cost.py.\n"
    only_tuned = transfer_laptop([record("transfer_laptop", "digits", 0, 0.5)])
    assert cells(only_tuned)[0][-1] == "not run: one of the two is missing"
