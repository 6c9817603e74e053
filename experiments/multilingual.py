"""Train one translation model of 102 languages, and models of one language each, each kind with its own best recipe.

    python -m experiments.multilingual --record

Both kinds try learning rates, then dropouts: a value and its two neighbours, then further ones while the best is at an
end of the range. They are judged by the lowest loss on the validation set, models of one language by the mean over
eight languages, from those with the fewest pairs to one of the richest. The learning rates of the model of 102
languages are those of the study of depth, see experiments/deep_or_wide.py. With the best recipe, the models of the
first seed translate the validation sets of these eight languages greedily and with two beam sizes; the search with the
highest chrF is used for the test set. Then further seeds and languages are trained, and all translate the test set.
Each core trains one model at a time. The same command continues after an interruption: it does not repeat what is in
the claim's records or in runs/multilingual and runs/deep_or_wide. About five hours on two cores.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from omegaconf import OmegaConf

from experiments.deep_or_wide import SEEDS as SEEDS_TOGETHER
from experiments.deep_or_wide import TUNING as TOGETHER
from experiments.deep_or_wide import score, score_translations, scoring_words
from experiments.program import StudyProgram
from experiments.tuning import Tuning, climb, train_each
from gpipe.records import Record, read_records
from reproductions import FOLDER, ROOT, RUNS_FILE
from reproductions.figure3_multilingual.pairs import BILINGUAL
from reproductions.figure3_multilingual.tables import figure3_design, figure3_low_resource
from reproductions.translation_runs import SCORING

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
BEAMS = (1, 2, 4)
ALONE = Tuning(BILINGUAL, Path("runs/multilingual"), RATES, FIRST_RATE, score)
MODEL = "t4_128_4"

Recipe = tuple[float, float]
"""A learning rate and a dropout."""


class Scored(NamedTuple):
    """What a model translates, and with which beam."""

    beam: int
    split: str = "test"


def train_alone(recipe: Recipe, language: str, seed: int, scored: Sequence[Scored] = ()) -> list[Record]:
    """Return the run of a model of one language, and the scores of its translations."""
    rate, dropout = recipe
    name = f"{language}_dropout_{dropout:g}"
    settings = [f"data.languages=[{language}]", f"trainer.max_steps={MAX_STEPS[language]}", "launch=one_process"]
    return _train(ALONE, name, [*settings, f"model.dropout={dropout:g}"], rate, seed, scored)


def train_together(recipe: Recipe, seed: int, scored: Sequence[Scored] = ()) -> list[Record]:
    """Return the run of a model of all languages, and the scores of its translations."""
    rate, dropout = recipe
    name, settings = MODEL, [f"model=translation_{MODEL}"]
    if dropout != FIRST_DROPOUT:
        name, settings = f"{MODEL}_dropout_{dropout:g}", [*settings, f"model.dropout={dropout:g}"]
    return _train(TOGETHER, name, settings, rate, seed, scored)


def _train(
    tuning: Tuning, name: str, settings: Sequence[str], rate: float, seed: int, scored: Sequence[Scored]
) -> list[Record]:
    """Return the run of a model and its scores; train it unless the claim or the folder of runs has them all."""
    folder = tuning.run_folder(name, rate, seed)
    asked = [(beam, split, TUNED if split != "test" and tuning is TOGETHER else ()) for beam, split in scored]
    words = [tuning.words(settings, rate, seed), *(scoring_words(folder, *each) for each in asked)]
    published = [_read_published().get(shlex.join(["python", *each])) for each in words]
    if None not in published:
        return [record for record in published if record is not None]
    return [tuning.train(name, settings, rate, seed), *(score_translations(folder, *each) for each in asked)]


@cache
def _read_published() -> dict[str, Record]:
    """Return the claim's records by their commands, without the file that a score is recorded in."""
    records = read_records(ROOT / FOLDER / CLAIM / RUNS_FILE)
    return {record.command.partition(" --record ")[0]: record for record in records}


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


def choose_beam(score: Callable[[Scored], list[Record]]) -> tuple[int, list[Record]]:
    """Return the beam whose translations of the validation set have the highest mean chrF, and all runs and scores."""
    scored = {beam: score(Scored(beam, "valid")) for beam in BEAMS}
    return max(BEAMS, key=lambda beam: mean_chrf(scored[beam])), [one for found in scored.values() for one in found]


def mean_chrf(records: Sequence[Record]) -> float:
    """Return the mean chrF of all languages of all scores among the records."""
    scores = [record.results["languages"].values() for record in records if record.experiment == SCORING]
    return fmean(language["chrf"] for languages in scores for language in languages)


def compare() -> list[Record]:
    """Return all runs and scores: those of the searches, and those of the best recipes."""
    alone, made = tune_alone()
    together, tried = tune(lambda recipe: train_together(recipe, 0))
    beam_alone, scored_alone = choose_beam(
        lambda scored: train_each(lambda language: train_alone(alone, language, 0, [scored]), TUNED, "validation sets")
    )
    beam_together, scored_together = choose_beam(lambda scored: train_together(together, 0, [scored]))
    made += [*tried, *scored_alone, *scored_together]
    made += train_each(
        lambda seed: train_together(together, seed, [Scored(beam_together)]), SEEDS_TOGETHER, "models of all languages"
    )
    made += train_each(
        lambda pair: train_alone(alone, pair[1], pair[0], [Scored(beam_alone)]),
        list(product(SEEDS_ALONE, MAX_STEPS)),
        "models of one language",
    )
    return [record for number, record in enumerate(made) if record not in made[:number]]


if __name__ == "__main__":
    program = StudyProgram(__doc__, {CLAIM: [figure3_design, figure3_low_resource]})
    program.parse()
    program.publish({CLAIM: compare()})
