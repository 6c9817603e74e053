"""Table 5: the paper's numbers beside ours, and whether larger mini-batches are better."""

import pytest

from reproductions.table5_batch_size.tables import (
    EXAMPLES,
    LAPTOP,
    PAPER_SCALE,
    claims,
    table5,
    table5_commands,
    table5_examples,
    table5_laptop,
    table5_run,
)
from tests.reproductions.paper_scale_records import composed
from tests.reproductions.translation_records import cells, scored, trained

PAPER = [
    {"title": "260K", "batch_tokens": "260000", "bleu": "30.92", "nll": "2.58"},
    {"title": "1M", "batch_tokens": "1000000", "bleu": "31.86", "nll": "2.51"},
]


@pytest.mark.parametrize("num_replicas", [1, 8])
def test_the_papers_numbers_stand_beside_ours_or_not_run(num_replicas: int) -> None:
    figures = {"evaluation": {"valid": {"loss": 2.5}}}
    sizes = "trainer.batch_size=1000000", f"launch.num_replicas={num_replicas}"
    run = composed(f"+experiment={PAPER_SCALE}", *sizes, **figures)
    small = trained(LAPTOP, 0, {}, loss=2.5, batch_size=260_000)
    rows = cells(table5([run, small, scored(run, {"de": 60.0}, {"de": 1})], PAPER))
    assert rows == [
        ["260K", "30.92", "not run", "2.58", "not run", "0"],
        ["1M", "31.86", "30.00", "2.51", "2.50", "1"],
    ]


def test_each_mini_batch_is_compared_with_the_next_smaller_one_seed_by_seed() -> None:
    records = [
        trained(LAPTOP, seed, {}, loss=loss, batch_size=size)
        for size, losses in ((4096, (2.0, 2.5)), (1024, (3.0, 3.0)), (16384, (1.0, 3.0)))
        for seed, loss in enumerate(losses)
    ]
    rows = cells(table5_laptop([*records, scored(records[0], {"sw": 20.0, "de": 40.0}, {"sw": 1, "de": 2})]))
    assert [row[1:6] for row in rows] == [[size, m, "400", read, "2"] for size, m, read in zip(
        ("1,024", "4,096", "16,384"), ("1", "4", "16"), ("409,600", "1,638,400", "6,553,600"), strict=True
    )]  # fmt: skip
    assert [row[6] for row in rows] == ["3.000 ± 0.000", "2.250 ± 0.354", "2.000 ± 1.414"]
    assert [row[7] for row in rows] == ["", "+0.750 ± 0.354", "+0.250 ± 1.061"]
    assert [row[-1].partition(" [")[0] for row in rows] == ["", *["no difference found"] * 2]
    assert rows[1][8:10] == ["15.00", "30.00"]


def test_with_the_examples_fixed_the_least_loss_counts_beside_the_last_one_with_the_steps_fixed() -> None:
    records = [
        trained(experiment, seed, {}, loss=last, batch_size=size, least_loss={"loss": least, "step": 1})
        for experiment in (LAPTOP, EXAMPLES)
        for size, last, least in ((1024, 3.0, 2.0), (4096, 2.5, 2.25))
        for seed in range(2)
    ]
    steps, examples = (cells(table(records))[:2] for table in (table5_laptop, table5_examples))
    assert [row[6] for row in steps] == ["3.000 ± 0.000", "2.500 ± 0.000"] and steps[1][-1].startswith(
        "reproduced [+0.5"
    )
    assert [row[6] for row in examples] == ["2.000 ± 0.000", "2.250 ± 0.000"]
    assert examples[1][-1].startswith("contradicted [-0.25")
    _, fixed_steps, fixed_examples = claims(records, PAPER)
    assert "steps fixed" in fixed_steps.text and fixed_steps.verdict.startswith("1,024 to 4,096: reproduced")
    assert "examples fixed" in fixed_examples.text and "contradicted" in fixed_examples.verdict
    assert [claim.verdict for claim in claims([], PAPER)] == ["not run"] * 3


def test_a_claim_says_that_one_rate_was_not_tuned_and_for_how_many_steps() -> None:
    records = [
        trained(EXAMPLES, seed, {}, loss=2.0, batch_size=size, num_steps=steps)
        for size, steps in ((1024, 600), (4096, 150), (16384, 37))
        for seed in range(2)
    ]
    drawn, said = (
        "intervals over seeds, not over validation lines",
        "; one learning rate for all, not tuned, 37 to 600 steps",
    )
    assert [row[4] for row in cells(table5_examples(records))[:3]] == ["614,400", "614,400", "606,208"]
    assert claims(records, PAPER)[2].scope == drawn + said
    searched = [*records, trained(EXAMPLES, 0, {}, loss=3.0, batch_size=1024, rate=0.25)]
    other_rate = [*records, trained(EXAMPLES, 0, {}, loss=3.0, batch_size=256, rate=0.25)]
    for tuned, end in ((searched, drawn), (other_rate, drawn), ([], "")):
        assert claims(tuned, PAPER)[2].scope == end


def test_without_records_the_tables_say_what_to_run() -> None:
    assert (
        table5_laptop([])
        == table5_run([])
        == table5_commands([])
        == "Not run: train.py -m +experiment=batch_size_laptop.\n"
    )
    assert table5_examples([]) == "Not run: train.py -m +experiment=batch_size_examples_laptop.\n"
    unscored = table5_laptop([trained(LAPTOP, 0, {})])
    assert unscored.endswith("BLEU and chrF: not run: bleu.py.\n")
