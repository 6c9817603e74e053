"""Which trainings of a translation model a table compares, where others of another recipe have the same name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpipe.records import Record, read_records
from reproductions.corpus import Corpus
from reproductions.figure3_multilingual.depth import DEEP_TRAINING, deep_trainings
from reproductions.figure3_multilingual.pairs import MULTILINGUAL, multilingual_trainings, pair_models
from reproductions.table5_batch_size.tables import LAPTOP, small_runs
from reproductions.translation_runs import DEEP_OR_WIDE, compare_recipes, searches, trainings
from tests.reproductions.translation_records import scored, trained

REPRODUCTIONS = Path(__file__).parents[2] / "reproductions"
OTHER_RECIPES = [{"rate": 0.125}, {"dropout": 0.5}, {"max_steps": 50}]
each_recipe = pytest.mark.parametrize("other", OTHER_RECIPES, ids=str)


def find_seeds(experiment: str, records: list[Record]) -> list[tuple[int, float | None]]:
    return [(one.run.seed, one.best("loss")) for one in trainings(records, experiment)]


@each_recipe
def test_a_search_under_the_same_name_replaces_no_training(other: dict[str, Any]) -> None:
    counted = [trained(LAPTOP, seed, {}, loss=2.0) for seed in (0, 1)]
    search = [trained(LAPTOP, 0, {}, loss=1.0, **other)]
    for records in (counted + search, search + counted):
        assert find_seeds(LAPTOP, records) == [(0, 2.0), (1, 2.0)]
        assert [one.run for one in searches(records, LAPTOP)] == search
        (sizes,) = small_runs(records).values()
        assert [one.best("loss") for one in sizes[4096].values()] == [2.0, 2.0]


@each_recipe
def test_of_recipes_with_as_many_seeds_the_one_of_the_least_validation_loss_counts(other: dict[str, Any]) -> None:
    worse = [trained(LAPTOP, seed, {}, loss=2.0) for seed in (0, 1)]
    better = [trained(LAPTOP, seed, {}, loss=1.0, **other) for seed in (0, 1)]
    assert find_seeds(LAPTOP, better + worse) == find_seeds(LAPTOP, worse + better) == [(0, 1.0), (1, 1.0)]


def test_each_model_language_and_mini_batch_has_a_recipe_of_its_own() -> None:
    records = [
        trained(LAPTOP, 0, {}, rate=0.25),
        trained(LAPTOP, 0, {}, rate=0.5, batch_size=1024),
        trained(LAPTOP, 0, {}, rate=0.125, languages=["sw"]),
        trained(LAPTOP, 0, {}, rate=0.0625, shape=(4, 128, 4)),
    ]
    assert [one.recipe.learning_rate for one in trainings(records, LAPTOP)] == [0.25, 0.5, 0.125, 0.0625]
    assert searches(records, LAPTOP) == []


def test_a_score_belongs_to_its_training_where_a_setting_has_come_between_them() -> None:
    run, other = (trained(LAPTOP, 0, {}, dropout=dropout) for dropout in (0.25, 0.5))
    score = scored(run, {"sw": 30.0}, {"sw": 100})
    later = replace(score, config=score.config | {"trainer": score.config["trainer"] | {"newer": None}})
    (found,) = trainings([run, later], LAPTOP)
    assert found.score("chrf", "sw") == 30.0
    (found,) = trainings([other, later], LAPTOP)
    assert found.score("chrf", "sw") is None


def test_every_committed_model_of_the_study_of_depth_is_scored() -> None:
    found = trainings(read_records(REPRODUCTIONS / "figure3_multilingual" / "runs.jsonl"), DEEP_OR_WIDE)
    assert found and not [f"{one.model}, seed {one.run.seed}" for one in found if not one.scored]


@each_recipe
def test_deep_trainings_of_another_recipe_are_a_setting_of_their_own(other: dict[str, Any]) -> None:
    runs = [trained(DEEP_TRAINING, 0, {}), trained(DEEP_TRAINING, 0, {}, **other)]
    found = deep_trainings(runs)
    assert [[run for way in ways.values() for run in way] for ways in found.values()] == [[run] for run in runs]


def test_the_multilingual_model_is_the_one_whose_command_the_page_prints() -> None:
    printed, other = trained(DEEP_OR_WIDE, 0, {"sw": 1.0}), trained(MULTILINGUAL, 0, {"sw": 2.0})
    bilingual = trained("bilingual_laptop", 0, {"sw": 3.0}, languages=["sw"])
    for records in ([printed, other, bilingual], [other, printed, bilingual]):
        assert [one.run for one in multilingual_trainings(records)] == [printed]
        (seeds,) = pair_models(records).values()
        assert seeds[0]["sw"][1].run == printed


def test_the_models_of_one_language_stand_beside_one_of_their_own_recipe_unless_theirs_is_the_best_that_was_tried() -> (
    None
):
    found = [trained(DEEP_OR_WIDE, seed, {"sw": 1.0}, loss=1.0, rate=0.25) for seed in (0, 1)]
    alike = [trained(DEEP_OR_WIDE, seed, {"sw": 2.0}, loss=2.0, rate=0.5) for seed in (0, 1)]
    alone = [trained("bilingual_laptop", seed, {"sw": 3.0}, languages=["sw"], rate=0.5) for seed in (0, 1)]
    search = trained("bilingual_laptop", 0, {"sw": 4.0}, languages=["sw"], rate=1.0)
    records = [*alike, *alone, *found]
    assert [one.run for one in trainings(records, DEEP_OR_WIDE)] == found
    better = trained("bilingual_laptop", 0, {"sw": 4.0}, languages=["sw"], rate=2.0, loss=0.5)
    assert compare_recipes([*alone, search, better], "bilingual_laptop") == {
        (2.0, 0.25): (1, 0.5), (0.5, 0.25): (1, 1.0), (1.0, 0.25): (1, 1.0)
    }  # fmt: skip
    for more, expected in (([], alike), ([search], found), ([search, better], alike)):
        (seeds,) = pair_models([*records, *more]).values()
        assert [pairs["sw"][1].run for pairs in seeds.values()] == expected
        assert [pairs["sw"][0].run for pairs in seeds.values()] == alone


def test_scores_of_a_validation_set_are_no_results() -> None:
    run = trained(LAPTOP, 0, {"sw": 1.0})
    test, valid = (
        scored(run, {"sw": chrf}, {"sw": 10}, sentences={"sw": number}) for chrf, number in ((9, 60), (8, 5))
    )
    valid = replace(valid, results={**valid.results, "split": "valid"})
    (one,) = trainings([run, test, valid], LAPTOP)
    assert one.score("chrf", "sw") == 9
    assert Corpus([run, test, valid], "corpus").num_sentences == {"sw": 60}
