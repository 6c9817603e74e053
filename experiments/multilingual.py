"""Train one translation model of 102 languages, and models of one language each, each kind with its own best recipe.

    python -m experiments.multilingual --record

Both kinds try learning rates, then dropouts: a value and its two neighbours, then further ones as long as the best is
at an end. They are judged by the least loss on the validation set, models of one language by the mean over eight
languages, from those with the fewest pairs to one of the richest. The learning rates of the model of 102 languages are
those of the study of depth, see experiments/deep_or_wide.py. With the best recipe, further seeds and languages are
trained, and all translate the test set greedily and with a beam of 4. Each core trains one model at a time. The runs
are in runs/multilingual and runs/deep_or_wide: the same command goes on from what is there. About four hours on two
cores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

from omegaconf import OmegaConf

from experiments.deep_or_wide import SEEDS as SEEDS_TOGETHER
from experiments.deep_or_wide import TUNING as TOGETHER
from experiments.deep_or_wide import score, score_translations
from experiments.program import StudyProgram
from experiments.tuning import Tuning, climb, train_each
from gpipe.records import Record
from reproductions import ROOT
from reproductions.figure3_multilingual.tables import BILINGUAL, figure3_design, figure3_low_resource

CLAIM = "figure3_multilingual"
RATES, FIRST_RATE = (0.00125, 0.0025, 0.005, 0.01, 0.02), 0.005
DROPOUTS, FIRST_DROPOUT = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6), 0.3
TUNED = ("gu", "lb", "ta", "te", "uz", "sw", "ms", "zh")
"""The languages that models of one language are tuned on: every seventh or so of those compared, by their pairs."""
_SWEEP = OmegaConf.load(ROOT / "conf" / "experiment" / f"{BILINGUAL}.yaml").hydra.sweeper.params
POOREST = re.findall(r"\w+", _SWEEP["data.languages"])
"""The half of the languages that has the fewest pairs: those of the sweep."""
MAX_STEPS = {**dict.fromkeys(POOREST, 600), **dict.fromkeys(("zh", "cs", "fi", "he", "sv", "ca", "id"), 1000)}
"""The most steps of each language that is compared: richer ones need more."""
SEEDS_ALONE = [int(seed) for seed in _SWEEP.seed.split(",")]
BEAMS = (1, 4)
ALONE = Tuning(BILINGUAL, Path("runs/multilingual"), RATES, FIRST_RATE, score)
MODEL = "t4_128_4"

Recipe = tuple[float, float]
"""A learning rate and a dropout."""


def train_alone(recipe: Recipe, language: str, seed: int, beams: Sequence[int] = ()) -> list[Record]:
    """Return the run of a model of one language, and the scores of its translations."""
    rate, dropout = recipe
    name = f"{language}_dropout_{dropout:g}"
    settings = [f"data.languages=[{language}]", f"trainer.max_steps={MAX_STEPS[language]}", "launch=one_process"]
    return _train(ALONE, name, [*settings, f"model.dropout={dropout:g}"], rate, seed, beams)


def train_together(recipe: Recipe, seed: int, beams: Sequence[int] = ()) -> list[Record]:
    """Return the run of a model of all languages, and the scores of its translations."""
    rate, dropout = recipe
    name, settings = MODEL, [f"model=translation_{MODEL}"]
    if dropout != FIRST_DROPOUT:
        name, settings = f"{MODEL}_dropout_{dropout:g}", [*settings, f"model.dropout={dropout:g}"]
    return _train(TOGETHER, name, settings, rate, seed, beams)


def _train(
    tuning: Tuning, name: str, settings: Sequence[str], rate: float, seed: int, beams: Sequence[int]
) -> list[Record]:
    run, folder = tuning.train(name, settings, rate, seed), tuning.run_folder(name, rate, seed)
    return [run, *(score_translations(folder, beam) for beam in beams)]


def tune(train: Callable[[Recipe], list[Record]]) -> tuple[Recipe, list[Record]]:
    """Search for the learning rate, then for the dropout at the best rate; return the best of both, and all runs."""
    runs: dict[Recipe, list[Record]] = {}

    def mean_score(recipe: Recipe) -> float:
        if recipe not in runs:
            runs[recipe] = train(recipe)
        return fmean(map(score, runs[recipe]))

    rate = climb(RATES, FIRST_RATE, lambda rate: mean_score((rate, FIRST_DROPOUT)))
    dropout = climb(DROPOUTS, FIRST_DROPOUT, lambda dropout: mean_score((rate, dropout)))
    return (rate, dropout), [run for found in runs.values() for run in found]


def tune_alone() -> tuple[Recipe, list[Record]]:
    """Return the best recipe of models of one language, and the runs of the search."""

    def train(recipe: Recipe) -> list[Record]:
        what = "languages, learning rate {:g}, dropout {:g}".format(*recipe)
        return train_each(lambda language: train_alone(recipe, language, 0), TUNED, what)

    return tune(train)


def compare() -> list[Record]:
    """Return all runs and scores: those of the searches, and those of the best recipes."""
    alone, runs_alone = tune_alone()
    together, runs_together = tune(lambda recipe: train_together(recipe, 0))
    compared = train_each(
        lambda pair: train_alone(alone, pair[1], pair[0], BEAMS),
        list(product(SEEDS_ALONE, MAX_STEPS)),
        "models of one language",
    )
    compared += train_each(
        lambda seed: train_together(together, seed, BEAMS), SEEDS_TOGETHER, "models of all languages"
    )
    made = [*runs_alone, *runs_together, *compared]
    return [record for number, record in enumerate(made) if record not in made[:number]]


if __name__ == "__main__":
    program = StudyProgram(__doc__, {CLAIM: [figure3_design, figure3_low_resource]})
    program.parse()
    program.publish({CLAIM: compare()})
