"""Deep or wide, and deep trainings: what was better, what trained, and what diverged."""

import re
from math import log2
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.records import Record, make_record
from reproductions.corpus import Corpus
from reproductions.figure3_multilingual.depth import (
    DEEP_OR_WIDE,
    DEEP_TRAINING,
    claims,
    deep_or_wide,
    deep_or_wide_models,
    deep_training,
    deep_trainings,
    describe_outcome,
    find_unfinished,
    gains_per_doubling,
    largest_rise,
    list_finished,
    models_by_depth,
)
from reproductions.translation_runs import PARAMETERS
from tests.reproductions.translation_records import cells, scored, trained

PAIRS = {"sw": 100, "de": 900}
DEEP, WIDE = (4, 128, 4), (2, 256, 8)


def course(*nll: float, norm: float = 1.0) -> list[dict[str, Any]]:
    return [
        {"step": 10 * place, "nll": value, "gradient_norm": norm * place, "clipped": 0.25}
        for place, value in enumerate(nll, start=1)
    ]


def deep(seed: int, training: list[dict[str, Any]], **results: Any) -> Record:
    return trained(DEEP_TRAINING, seed, {}, shape=(64, 64, 2), training=training, **results)


def test_the_models_stand_side_by_side_by_resource_group() -> None:
    runs = [
        trained(DEEP_OR_WIDE, seed, {"sw": loss + 1, "de": loss - 1}, loss=loss, shape=shape)
        for seed, losses in ((0, (2.0, 2.5)), (1, (3.0, 3.25)))
        for shape, loss in zip((DEEP, WIDE), losses, strict=True)
    ]
    scores = [scored(run, {"sw": 10.0, "de": 20.0 + 4 * (place % 2)}, PAIRS) for place, run in enumerate(runs)]
    table = cells(deep_or_wide([*runs, *scores]))
    assert table[0][:-1] == ["loss", "all, 2", "2.875 ± 0.530", "2.500 ± 0.707", "-0.375 ± 0.177", "2"]
    assert [row[3] for row in table[1:3]] == ["1.500 ± 0.707", "3.500 ± 0.707"]
    assert table[0][-1].startswith("no difference found [-"), "two seeds decide little"
    assert [row[1] for row in table[1:3]] == ["high, 1", "low, 1"]
    assert table[3][4:] == ["", "2", "not run: bleu.py"]
    chrf = [row for row in table if row[0] == "chrF, beam 4"]
    assert chrf[0][4:6] == ["-2.00 ± 0.00", "2"] and chrf[2][2:4] == ["10.00 ± 0.00"] * 2


def test_seeds_that_disagree_decide_nothing_and_what_was_not_scored_says_so() -> None:
    runs = [
        trained(DEEP_OR_WIDE, seed, {"sw": loss}, shape=shape)
        for seed, losses in ((0, (2.0, 2.5)), (1, (3.0, 2.5)))
        for shape, loss in zip((DEEP, WIDE), losses, strict=True)
    ]
    table = cells(deep_or_wide(runs))
    assert table[0][4:6] == ["+0.000 ± 0.707", "2"] and table[0][-1].startswith("no difference found [-")
    assert {row[-1] for row in table if row[0] in ("chrF", "BLEU")} == {"not run: bleu.py"}


def test_models_that_were_planned_but_not_trained_are_named() -> None:
    shapes = WIDE, DEEP, (8, 64, 2), (16, 32, 1)
    names = "num_layers", "feedforward_size", "num_heads"
    rows = [dict(zip(names, shape, strict=True), model_size=64, parameters_beside_tables=1) for shape in shapes]
    results = {"models": [], "laptop": rows}
    plan = make_record(kind="planned", experiment=PARAMETERS, config={}, seed=0, results=results)
    runs = [trained(DEEP_OR_WIDE, 0, {"sw": 2.0}, shape=shape) for shape in (DEEP, WIDE)]
    assert deep_or_wide([*runs, plan]).endswith("\n\nNot run: T(8, 64, 2), 64 wide; T(16, 32, 1), 64 wide.\n")
    assert "Not run" not in deep_or_wide(
        [*runs, *(trained(DEEP_OR_WIDE, 0, {}, shape=shape) for shape in shapes), plan]
    )


@given(
    st.lists(st.integers(1, 64), min_size=2, max_size=5, unique=True),
    st.lists(st.floats(-2, 2), min_size=1, max_size=3),
)
def test_a_doubling_adds_the_slope_of_the_line_through_all_depths(layers: list[int], slopes: list[float]) -> None:
    runs = [
        trained(DEEP_OR_WIDE, seed, {"sw": 9 + slope * log2(depth), "de": 5.0}, shape=(depth, 512 // depth, 4))
        for seed, slope in enumerate(slopes)
        for depth in layers
    ]
    (depths,) = models_by_depth(
        [*runs, trained(DEEP_OR_WIDE, 9, {"sw": 1.0}, shape=(layers[0], 512 // layers[0], 4))]
    ).values()
    gains = gains_per_doubling(depths, "loss", ["sw", "de", "fi"], Corpus([], "corpus"))
    assert list(depths) == sorted(layers) and list(gains) == list(range(len(slopes)))
    for seed, slope in enumerate(slopes):
        assert gains[seed] == pytest.approx({"sw": slope, "de": 0.0}, abs=1e-9)


def test_a_seed_that_lacks_a_score_is_not_counted() -> None:
    runs = [trained(DEEP_OR_WIDE, seed, {"sw": 1.0}, shape=shape) for seed in (0, 1) for shape in (DEEP, WIDE)]
    scores = [scored(run, {"sw": 30.0}, {"sw": 100}) for run in runs[1:]]
    counted = {row[0].partition(",")[0]: row[-2] for row in cells(deep_or_wide([*runs, *scores])) if row[1] == "all, 1"}
    assert counted == {"loss": "2", "token accuracy": "2", "chrF": "1", "BLEU": "1"}


def test_a_row_has_a_way_to_train_a_deep_model_and_what_became_of_it() -> None:
    records = [
        deep(0, course(8.0, 4.0, 5.0)),
        deep(1, course(8.0, 6.0, norm=2.0), evaluation={"valid": {"loss": 2.0}}, least_loss={"loss": 1.5}),
        deep(0, course(8.0, 9.0), scaled=False, limit=None),
        deep(1, course(8.0), scaled=False, limit=None, evaluation={}, failure="the loss of step 12 is nan"),
    ]
    both, neither = cells(deep_training(records))
    assert len(deep_trainings([*records, deep(0, [], rate=0.25)])) == 2, "one of each learning rate"
    assert both[:5] == ["yes", "20", "2", "1.500 ± 0.707", "1.250 ± 0.354"]
    assert both[5:] == ["8.000 ± 0.000", "5.500 ± 0.707", "0.500 ± 0.707", "4", "25.00%", "trained: 2"]
    assert neither[:4] == ["no", "none", "2", "1.000"]
    assert neither[-2:] == ["", "learnt nothing: 1, diverged after step 10: 1"]


def test_searches_for_a_rate_at_which_depth_fails_are_one_claim() -> None:
    records = [
        deep(seed, course(8.0, 4.0), evaluation={"valid": {"loss": loss + seed}}, rate=rate, **way)
        for rate, losses in ((0.25, (2.0, 2.5)), (0.5, (2.0, 1.0)))
        for seed in range(2)
        for loss, way in zip(losses, ({}, {"scaled": False, "limit": None}), strict=True)
    ]
    paper = [{"num_layers": layers, "bleu_read_off_by_third_party": "30.0"} for layers in ("12", "24")]
    (claim,) = claims([*records, deep(0, course(8.0, 9.0), rate=0.75)], paper)
    assert claim.measured == "with both: 4 of 5 trained, 1 of 5 learnt nothing; with neither: 4 of 4 trained"
    assert re.findall(r"rate (\S+),.*?: (\w+)", claim.verdict) == [("0.25", "reproduced"), ("0.5", "contradicted")]


def test_trainings_that_all_diverge_without_the_measures_are_no_test_and_not_said_to_be_not_run() -> None:
    lost = {"scaled": False, "limit": None, "evaluation": {}, "failure": "the loss of step 12 is nan"}
    records = [deep(seed, course(8.0, 4.0), **way) for seed in range(2) for way in ({}, lost)]
    paper = [{"num_layers": layers, "bleu_read_off_by_third_party": "30.0"} for layers in ("12", "24")]
    (claim,) = claims(records, paper)
    assert claim.measured == "with both: 2 of 2 trained; with neither: 2 of 2 diverged after step 20"
    assert claim.verdict == "no test: no seed ended both with the measures and without them"


def test_outcomes_are_counted_by_how_many_measures_a_training_has() -> None:
    ways = [(True, 20.0), (True, None), (False, 20.0), (False, None)]
    records = [
        deep(seed, course(8.0, 9.0 if seed < number else 4.0), scaled=scaled, limit=limit)
        for number, (scaled, limit) in enumerate(ways)
        for seed in range(4)
    ]
    paper = [{"num_layers": layers, "bleu_read_off_by_third_party": "30.0"} for layers in ("12", "24")]
    (claim,) = claims(records, paper)
    both, one, neither = claim.measured.split("; ")
    assert both == "with both: 4 of 4 trained"
    assert sorted(one.removeprefix("with one: ").split(", ")) == ["3 of 8 learnt nothing", "5 of 8 trained"]
    assert sorted(neither.removeprefix("with neither: ").split(", ")) == ["1 of 4 trained", "3 of 4 learnt nothing"]


def test_a_model_whose_training_is_unfinished_is_in_one_verdict_and_not_in_the_other() -> None:
    # The loss falls by 1 from 1 to 2 layers, and rises by 1 with each doubling of the line through 4 layers too. These
    # are unfinished with every seed; with 2 layers, one seed is.
    runs = [
        trained(
            DEEP_OR_WIDE, seed, {}, shape=(depth, 512 // depth, 4),
            least_loss={"loss": loss, "sw/loss": loss, "de/loss": loss, "step": step},
        )
        for seed in range(3)
        for depth, loss, step in ((1, 3.0, 300), (2, 2.0, 400 if seed == 0 else 300), (4, 5.0, 400))
    ]  # fmt: skip
    scores = [scored(run, {"sw": 10.0, "de": 10.0}, PAIRS) for run in runs]
    records = [*runs, *scores]
    (depths,) = models_by_depth(records).values()
    assert [one.model for one in find_unfinished(depths)] == ["T(4, 128, 4), 64 wide"]
    assert list(list_finished(depths)) == [1, 2]
    table = deep_or_wide(records)
    assert table.splitlines()[0].endswith("| deep is better | without T(4, 128, 4), 64 wide |")
    loss = cells(table)[0]
    assert loss[-2:] == ["contradicted [-1.000, -1.000]", "reproduced [+1.000, +1.000]"]
    paper = [{"num_layers": layers, "bleu_read_off_by_third_party": "30.0"} for layers in ("12", "24")]
    every, finished = claims(records, paper)
    assert every.scope.endswith(": 1 language with 100 training pairs")
    assert finished.scope.endswith(", without T(4, 128, 4), 64 wide, whose training is unfinished")
    assert (every.measured[:48], finished.measured[:48]) == (
        "gain with each doubling of the depth, 3 depths: ",
        "gain with each doubling of the depth, 2 depths: ",
    )
    assert every.verdict.startswith("loss: contradicted [-1.000, -1.000]")
    assert finished.verdict.startswith("loss: reproduced [+1.000, +1.000]")
    assert list_finished({depth: depths[depth] for depth in (1, 4)}) == {}, "one depth has no line"
    assert len(claims([run for run in runs if run.config["model"]["num_layers"] < 4], paper)) == 1


def test_languages_with_small_test_sets_have_rows_of_the_whole_poorer_half() -> None:
    pairs = {"sw": 100, "yi": 50, "de": 900, "fr": 800}
    losses = {"sw": 2.0, "yi": 4.0, "de": 1.0, "fr": 1.0}
    runs = [trained(DEEP_OR_WIDE, 0, losses, shape=shape) for shape in (DEEP, WIDE)]
    scores = [scored(run, dict.fromkeys(pairs, 10.0), pairs, sentences={"yi": 5}) for run in runs]
    rows = [row for row in cells(deep_or_wide([*runs, *scores])) if row[0] == "loss"]
    assert [row[1:3] for row in rows[1:]] == [
        ["high, 2", "1.000"],
        ["low, 1", "2.000"],
        ["low, small test sets too, 2", "3.000"],
    ]


@pytest.mark.parametrize(
    ("nll", "outcome", "rise"),
    [((3.0, 2.0, 2.5, 2.25), "trained", 0.5), ((3.0, 3.5), "learnt nothing", 0.5), ((3.0, 2.0), "trained", 0.0)],
)
def test_a_course_is_summed_up(nll: tuple[float, ...], outcome: str, rise: float) -> None:
    assert (describe_outcome(deep(0, course(*nll))), largest_rise(course(*nll))) == (outcome, rise)


def test_without_records_the_tables_say_what_to_run() -> None:
    assert deep_or_wide([]) == "Not run: python -m experiments.deep_or_wide.\n"
    assert deep_training([]) == "Not run: train.py -m +experiment=deep_training_laptop.\n"
    assert deep_or_wide_models([]) == "Not run: python -m experiments.translation_parameters.\n"
    assert deep_training([deep(0, [])]).endswith("| trained: 1 |\n"), "an old record has no course"
