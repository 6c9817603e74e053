"""Accuracy against size: the validation images choose the rate, and the verdict is that of the seeds' slopes."""

from itertools import product

import pytest

from gpipe.records import Record, make_record
from reproductions.table4_imagenet_and_transfer.model_size import (
    TRAINED,
    gain_per_doubling,
    model_size,
    size_arms,
    size_claims,
    tuned_sizes,
)

PHOTOGRAPHS, DIGITS = TRAINED.values()


def trained(num_filters: int, seed: int, top1: float, rate: float = 0.01, valid: float = 0.5) -> Record:
    config = {"model": {"num_filters": num_filters}, "optimizer": {"learning_rate": rate}, "trainer": {"num_epochs": 5}}
    evaluation = {"valid": {"top1": valid}, "test": {"top1": top1, "raw_top1": top1}}
    results = {"parameters": num_filters**2, "evaluation": evaluation, "top1": top1, "num_steps": 9, "seconds": 50.0}
    return make_record(kind="measured", command="c", experiment=PHOTOGRAPHS, config=config, seed=seed, results=results)


def test_the_validation_images_of_the_first_seed_choose_the_rate_whatever_the_test_images_say() -> None:
    records = [
        trained(8, 0, 0.6, 0.003, valid=0.5),
        trained(8, 0, 0.9, 0.001, valid=0.4),
        trained(8, 0, 0.5, 0.01, valid=0.7),
        trained(8, 1, 0.7, 0.01, valid=0.1),
    ]
    (size,) = tuned_sizes(records, PHOTOGRAPHS).values()
    assert (size.rate, size.top1) == (0.01, {0: 0.5, 1: 0.7})
    assert [run.config["optimizer"]["learning_rate"] for run in size.searched] == [0.003, 0.001]
    arms = size_arms(records)
    assert [(len(arm.runs), len(arm.searched)) for arm in arms] == [(2, 2), (0, 0)]
    assert "| 60.00% | 14.14% | 2 |" in model_size(records)


@pytest.mark.parametrize(("slope", "verdict"), [(0.02, "reproduced"), (-0.02, "contradicted")])
def test_a_slope_that_all_seeds_share_decides(slope: float, verdict: str) -> None:
    records = [
        trained(num_filters, seed, 0.5 + 2 * slope * place + seed / 100)
        for (place, num_filters), seed in product(enumerate((8, 16, 32)), range(3))
    ]
    gain = gain_per_doubling(tuned_sizes(records, PHOTOGRAPHS))
    assert gain is not None
    assert gain.mean == pytest.approx(slope), "four times the parameters are two doublings"
    (claim,) = size_claims(records)
    assert claim.measured == f"points of top-1 per doubling of the parameters: photographs {100 * slope:+.2f}"
    assert claim.verdict.startswith(f"photographs: {verdict} [")


def test_one_size_has_no_slope_and_no_run_says_so() -> None:
    assert gain_per_doubling(tuned_sizes([trained(8, 0, 0.5)], PHOTOGRAPHS)) is None
    assert model_size([]) == "Not run: python -m experiments.model_size.\n"
    assert [claim.verdict for claim in size_claims([])] == ["not run"]
    assert DIGITS in {arm.experiment for arm in size_arms([])}
