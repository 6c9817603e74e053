"""Tune one translation model of 102 languages, and models of one language each, before they are compared.

    python -m experiments.multilingual --record

Both kinds try learning rates, then dropouts: a value and its two neighbours, then further ones as long as the best is
at an end. They are judged by the least loss on the validation set, models of one language by the mean over eight
languages, from those with the fewest pairs to one of the richest. The learning rates of the model of 102 languages are
those of the study of depth, see experiments/deep_or_wide.py. The comparison itself is two sweeps, see
reproductions/figure3_multilingual. Each core trains one model at a time. The runs are in runs/multilingual and
runs/deep_or_wide: the same command goes on from what is there. About an hour on two cores, by its first runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from experiments.deep_or_wide import TUNING as TOGETHER
from experiments.deep_or_wide import score
from experiments.program import StudyProgram
from experiments.tuning import Tuning, climb, train_each
from gpipe.records import Record
from reproductions.figure3_multilingual.tables import BILINGUAL, figure3_design

CLAIM = "figure3_multilingual"
RATES, FIRST_RATE = (0.00125, 0.0025, 0.005, 0.01, 0.02), 0.005
DROPOUTS, FIRST_DROPOUT = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6), 0.3
# Every seventh or so of those that are compared, by their training pairs, with the fewest and the most.
LANGUAGES = {"gu": 600, "lb": 600, "ta": 600, "te": 600, "uz": 600, "sw": 600, "ms": 600, "zh": 1000}
"""The languages that models of one language are tuned on, with the most steps that each takes in the comparison."""
ALONE = Tuning(BILINGUAL, Path("runs/multilingual"), RATES, FIRST_RATE, score)
MODEL = "t4_128_4"


def train_alone(rate: float, dropout: float) -> list[Record]:
    """Return the runs of one model per language."""

    def train(language: str) -> list[Record]:
        settings = [f"data.languages=[{language}]", f"trainer.max_steps={LANGUAGES[language]}", "launch=one_process"]
        return [ALONE.train(f"{language}_dropout_{dropout:g}", [*settings, f"model.dropout={dropout:g}"], rate, 0)]

    return train_each(train, list(LANGUAGES), f"languages, learning rate {rate:g}, dropout {dropout:g}")


def train_together(rate: float, dropout: float) -> list[Record]:
    """Return the run of one model for all languages."""
    name, settings = MODEL, [f"model=translation_{MODEL}"]
    if dropout != FIRST_DROPOUT:
        name, settings = f"{MODEL}_dropout_{dropout:g}", [*settings, f"model.dropout={dropout:g}"]
    return [TOGETHER.train(name, settings, rate, 0)]


def tune(train: Callable[[float, float], Sequence[Record]]) -> list[Record]:
    """Return the runs of a search: for the learning rate first, then for the dropout at the best rate."""
    runs: dict[tuple[float, float], Sequence[Record]] = {}

    def mean_score(rate: float, dropout: float) -> float:
        runs[rate, dropout] = runs.get((rate, dropout)) or train(rate, dropout)
        return fmean(map(score, runs[rate, dropout]))

    rate = climb(RATES, FIRST_RATE, lambda rate: mean_score(rate, FIRST_DROPOUT))
    climb(DROPOUTS, FIRST_DROPOUT, lambda dropout: mean_score(rate, dropout))
    return [run for found in runs.values() for run in found]


if __name__ == "__main__":
    program = StudyProgram(__doc__, {CLAIM: [figure3_design]})
    program.parse()
    program.publish({CLAIM: tune(train_alone) + tune(train_together)})
