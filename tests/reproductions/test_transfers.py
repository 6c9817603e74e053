"""Transfers at laptop scale: each start at the rate that validation images choose, step by step."""

from collections.abc import Sequence

from gpipe.records import Record, make_record
from reproductions.table4_imagenet_and_transfer.transfers import (
    FEW,
    SHARES,
    WHOLE,
    Images,
    read_starts,
    transfer_arms,
    transfer_cells,
    transfer_checkpoints,
    transfer_claims,
    transfer_steps,
)
from tests.reproductions.test_table4 import cells


def run(
    limit: int | None, seed: int, rate: float, init_from: str | None, valid: float, top1: Sequence[float | None]
) -> Record:
    """Return a run with its accuracies on the test images after each of SHARES; None where it was not evaluated."""
    steps = 800 if limit is None else 400
    curve = [
        point
        for share, value in zip(SHARES.values(), top1, strict=True)
        for step in [steps // share]
        for point in ({"step": step, "valid/top1": valid}, {"step": step, "test/top1": value})
        if None not in point.values()
    ]
    return make_record(
        kind="measured", command="c", experiment=WHOLE if limit is None else FEW, seed=seed,
        config={
            "data": {"name": "digits", "max_images": limit},
            "init_from": init_from,
            "optimizer": {"learning_rate": rate},
            "trainer": {"max_steps": steps},
        },
        results={"top1": valid, "evaluation": {"valid": {"top1": valid}, "test": {"top1": top1[-1]}}, "curve": curve},
    )  # fmt: skip


def both_starts(limit: int | None, gain: float) -> list[Record]:
    """Return runs of three rates and two seeds; the second rate is the best from scratch, the third fine-tuned."""
    return [
        run(
            limit, seed, rate, init_from, valid, [start + seed / 64 for start in (base, base, base + 0.25, base + 0.25)]
        )
        for init_from, best, better in ((None, 0.25, 0.0), ("x", 0.5, gain))
        for rate in (0.125, 0.25, 0.5)
        for seed in (0, 1)
        # The worse rates have the better accuracy on the test images, which must not choose.
        for valid, base in [(0.75, 0.25 + better) if rate == best else (0.5, 0.5)]
    ]


def test_each_start_has_the_rate_that_its_validation_images_choose() -> None:
    scratch, tuned, gain = cells(transfer_steps(both_starts(50, 0.125)))
    assert scratch[:5] == ["digits", "50", "400", "from scratch", "0.25 of 0.125, 0.25, 0.5"]
    assert tuned[3:5] == ["fine-tuned", "0.5 of 0.125, 0.25, 0.5: at the end of the search"]
    assert scratch[5:9] == ["25.8%", "25.8%", "50.8%", "50.8%"]
    assert tuned[5:9] == ["38.3%", "38.3%", "63.3%", "63.3%"]
    assert gain[3:9] == ["gain", "", *["+12.5"] * 4] and gain[9] == "reproduced [+12.5%, +12.5%]"


def test_rates_are_compared_on_the_seeds_that_all_have() -> None:
    curve = (0.5,) * 4
    tried = [run(50, seed, rate, None, rate - seed / 4, curve) for rate in (0.5, 0.75) for seed in (0, 1)]
    chosen = run(50, 2, 0.75, None, 0.0, curve)  # a seed of the best rate alone, with a worse draw of images
    (starts,) = read_starts([*tried, chosen]).values()
    assert starts["from scratch"].rate == 0.75 and sorted(starts["from scratch"].runs) == [0, 1, 2]
    assert transfer_arms([*tried, chosen])[1].searched == tried[:2]
    (apart,) = read_starts([run(50, 0, 0.5, None, 0.25, curve), run(50, 1, 0.75, None, 0.5, curve)]).values()
    assert apart["from scratch"].rate == 0.75, "without a seed that both have, each counts with its own"


def test_whole_sets_come_last_and_are_evaluated_at_their_own_steps() -> None:
    rows = cells(transfer_steps([*both_starts(None, 0.125), *both_starts(500, 0.0)]))
    assert [row[:4] for row in rows[2:4]] == [
        ["digits", "500", "400", "gain"],
        ["digits", "all", "800", "from scratch"],
    ]
    whole, few = transfer_claims([*both_starts(None, 0.125), *both_starts(500, 0.0)])
    assert whole.verdict == "digits, all images: reproduced [+12.5%, +12.5%]"
    assert whole.measured == "+12.5 points of top-1"
    assert few.verdict == "digits, 500 images: no difference found [+0.0%, +0.0%]"
    longer = run(None, 0, 0.5, None, 0.5, (0.5,) * 4)
    longer.config["trainer"]["max_steps"] = 1600
    assert [*read_starts([*both_starts(None, 0.0), longer])] == [Images("digits", None, n) for n in (800, 1600)]


def test_runs_without_a_number_of_steps_or_without_images_that_choose_are_left_out() -> None:
    endless, unchosen = (run(None, 0, 0.5, None, 0.5, (0.5,) * 4) for _ in range(2))
    endless.config["trainer"]["max_steps"] = None
    del unchosen.results["evaluation"]["valid"]
    assert read_starts([endless, unchosen]) == {}


def test_a_start_has_its_rise_between_the_last_two_numbers_of_steps() -> None:
    rising = [run(50, seed, 0.5, None, 0.5, (0.25, 0.25, 0.25, 0.5)) for seed in (0, 1)]
    steady = [run(100, seed, 0.5, None, 0.5, (0.25, 0.25, 0.5, 0.5 + seed / 64)) for seed in (0, 1)]
    ends = [row[-1] for row in cells(transfer_steps([*rising, *steady]))]
    assert ends[0] == "+25.0% [+25.0%, +25.0%]" and ends[1].startswith("+0.8% [-9.")
    early = run(50, 0, 0.5, None, 0.5, (0.25, None, None, 0.5))
    assert cells(transfer_steps([early]))[0][5:] == ["25.0%", "", "", "50.0%", "not run"]


def test_the_claim_compares_the_seeds_that_both_starts_have() -> None:
    _, claim = transfer_claims(
        [*both_starts(50, 0.125), *both_starts(100, -0.125), run(50, 7, 0.25, None, 1.0, (1.0,) * 4)]
    )
    assert claim.measured == "-12.5 to +12.5 points of top-1"
    assert claim.verdict == (
        "digits, 50 images: reproduced [+12.5%, +12.5%]; digits, 100 images: contradicted [-12.5%, -12.5%]"
    )
    only_scratch = [one for one in both_starts(50, 0.125) if one.config["init_from"] is None]
    assert len(cells(transfer_steps(only_scratch))) == 1 and transfer_claims(only_scratch)[1].measured == "not run"


def test_each_seed_has_its_gain_in_test_images_and_the_pre_training_that_it_began_with() -> None:
    scratch = [run(50, seed, 0.5, None, 0.75, (0.5,) * 3 + (right / 40,)) for seed, right in ((0, 21), (1, 19))]
    tuned = [
        run(50, seed, rate, f"runs/photographs/{folder}", valid, (0.5,) * 3 + (right / 40,))
        for seed, rate, folder, valid, right in (
            (0, 0.25, "2026-11-02", 0.25, 3), (1, 0.25, "2026-11-01", 0.25, 3),
            (0, 0.5, "2026-11-01", 0.75, 18), (1, 0.5, "2026-11-01", 0.75, 23),
        )
    ]  # fmt: skip
    ours, folders = map(cells, transfer_checkpoints([*scratch, *tuned]).split("\n\n"))
    assert ours == [["digits", "50", "400", "-3, +4", "40", "0.5", "0.25: P2 P1; 0.5: P1 P1"]]
    assert folders == [["P1", "2026-11-01"], ["P2", "2026-11-02"]]
    assert transfer_checkpoints(scratch) == "Not run: train.py -m +experiment=transfer_table_laptop.\n"


def test_all_trainings_are_told_those_of_other_rates_too() -> None:
    records = both_starts(50, 0.125)
    (starts,) = read_starts([*records, *records]).values()
    assert len(transfer_cells(records)) == len(records) == 12
    arms = transfer_arms(records)[1:]
    assert [(len(arm.runs), len(arm.searched)) for arm in arms] == [(2, 4)] * 2
    assert sorted(starts) == ["fine-tuned", "from scratch"]


def test_without_records_the_table_says_what_to_run() -> None:
    assert transfer_steps([]) == "Not run: train.py -m +experiment=transfer_table_laptop.\n"
    assert [(arm.experiment, arm.runs) for arm in transfer_arms([])] == [(WHOLE, ()), (FEW, ())]
    assert [claim.verdict for claim in transfer_claims([])] == ["not run"] * 2
