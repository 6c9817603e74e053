"""A page states question, budget, tuning and test items before its verdicts, from the records and the settings."""

import random
import re
from fractions import Fraction
from pathlib import Path

import pytest

from gpipe.records import Record, make_record
from reproductions.design import Arm, count_images, design_table
from tests.reproductions.translation_records import cells, trained

ROOT = Path(__file__).parents[2]
DESIGNED = {"figure3": "figure3_multilingual", "table4": "table4_imagenet_and_transfer", "table5": "table5_batch_size"}


def design(*runs: Record, searched: tuple[Record, ...] = (), experiment: str = "batch_size_laptop") -> list[str]:
    (row,) = cells(design_table([Arm("why?", "what", experiment, runs, searched, test_items="7 sentences")]))
    return row


@pytest.mark.parametrize(("name", "folder"), DESIGNED.items())
def test_the_design_stands_above_the_verdicts(name: str, folder: str) -> None:
    page = (ROOT / "reproductions" / folder / "README.md").read_text("utf-8")
    assert re.findall(r"<!-- table: (\w+) -->", page)[:2] == [f"{name}_design", "claims"]


def test_a_study_without_a_search_says_that_it_was_not_tuned() -> None:
    runs = [trained("e", seed, {}, seconds=1500.5, num_steps=steps) for seed, steps in ((0, 300), (1, 400))]
    expected = ["why?", "what (`batch_size_laptop`)", "2", "2", "300 to 400 (at most 400)"]
    assert design(*runs) == [*expected, "not tuned: learning rate 0.5, dropout 0.25", "7 sentences", "3,001"]


def test_a_search_names_what_it_varied_and_is_part_of_what_was_spent() -> None:
    run, other = trained("e", 0, {}, seconds=10.0), trained("e", 0, {}, seconds=5.0, rate=0.125)
    row = design(run, searched=(other,))
    assert (row[2], row[5], row[-1]) == ("1, and 1 for tuning", "learning rate: 0.125, 0.5", "15")


def test_settings_with_rows_of_their_own_are_no_tuning() -> None:
    row = design(trained("e", 0, {}), trained("e", 0, {}, rate=0.125))
    assert row[5] == "not tuned: dropout 0.25; a row for each learning rate 0.125, 0.5"


def test_what_was_not_run_has_the_budget_of_its_settings() -> None:
    row = design(experiment="batch_size_laptop")
    assert row[2:] == ["0", "not run", "not run (at most 150)", "not tuned: nothing was run", "", "not run"]
    assert design(experiment="transfer_laptop")[4] == "not run (4 epochs)"


def test_the_test_images_are_counted_from_the_accuracies() -> None:
    for num_images in (355, 1_000, 10_000):
        draw = random.Random(num_images)
        shares = [draw.randrange(num_images) / num_images for _ in range(40)]
        runs = [
            make_record(kind="measured", command="c", experiment="e", config={}, seed=0, results={
                "evaluation": {"test": {"top1": one, "raw_top1": other}}, "curve": [{"step": 1}, {"test/top1": one}],
            })
            for one, other in zip(shares[::2], shares[1::2], strict=True)
        ]  # fmt: skip
        assert count_images(runs) == num_images
    assert Fraction(355, 1_000).denominator != 355, "one accuracy alone may not tell"
