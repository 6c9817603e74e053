"""The models that are compared, one of all languages with one per language, and their figures side by side."""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from statistics import fmean

from gpipe.records import Record
from reproductions.corpus import MIN_TEST_SENTENCES, Corpus
from reproductions.figure3_multilingual.gain import Gains, Line, fit_line
from reproductions.translation_runs import (
    DEEP_OR_WIDE,
    Trained,
    beams,
    describe_search,
    is_tuned,
    searches,
    trainings,
)
from reproductions.verdict import Interval, over_seeds_and_parts

MULTILINGUAL = "transformer_multilingual_laptop"
BILINGUAL = "bilingual_laptop"
Pairs = Mapping[str, tuple[Trained, Trained]]
"""The bilingual and the multilingual model of a seed, by the bilingual one's language."""
EVERY, TESTED = "all languages", f"{MIN_TEST_SENTENCES} test sentences or more"
"""The groups of languages that means are over."""


def multilingual_trainings(records: Sequence[Record]) -> list[Trained]:
    """Return the small models of all languages that stand beside those of one language, if there are any of these.

    They have the learning rate and the dropout of the models of one language, unless these have what a search found
    best, too: what one found for the model of all languages alone would favour it. Of the same model and seed that of
    deep_or_wide counts, whose command the page prints.
    """
    alone = [] if is_tuned(records, BILINGUAL) else trainings(records, BILINGUAL)
    alike = {(one.setting, one.recipe[:2]) for one in alone}
    found: dict[tuple[str, int], Trained] = {}
    for experiment in (MULTILINGUAL, DEEP_OR_WIDE):
        counted, others = trainings(records, experiment), searches(records, experiment)
        every = [one for one in (*others, *counted) if (one.setting, one.recipe[:2]) in alike] if alike else counted
        found |= {(one.setting, one.run.seed): one for one in every}
    return list(found.values())


def list_multilingual(records: Sequence[Record]) -> list[Trained]:
    """Return all small models of all languages that the page compares with anything, each once."""
    every = [*multilingual_trainings(records), *trainings(records, DEEP_OR_WIDE)]
    return list({(one.setting, one.recipe, one.run.seed): one for one in every}.values())


@dataclass(frozen=True)
class Figure:
    """A figure of both models, as a row shows it.

    Attributes:
        name: in the records.
        title: in the tables.
        form: how it is written.
        beam: of a score; None for other figures.
        less_is_better: such as for a loss.
        is_judged: whether there is one per language, of which a verdict is made.
    """

    name: str
    title: str
    form: str
    beam: int | None = None
    less_is_better: bool = False
    is_judged: bool = True

    def of(self, one: Trained, language: str) -> float | None:
        """Return the figure of a model on a language."""
        if self.name in SCORES:
            return one.score(self.name, language, self.beam)
        return one.best(self.name, language if self.is_judged else None)


SCORES = {"chrf": "chrF", "bleu": "BLEU"}
LOSS = Figure("loss", "lowest loss, nats per token", ".3f", less_is_better=True)
_STEPS = Figure("step", "steps to the lowest loss", ".0f", is_judged=False)


def list_figures(seeds: Iterable[Pairs]) -> list[Figure]:
    """Return the figures to compare, with the scores of each beam."""
    found = beams(one for pairs in seeds for pair in pairs.values() for one in pair)
    scores = [
        Figure(name, f"{title}, {describe_search(beam)}", ".2f", beam)
        for beam, (name, title) in itertools.product(found, SCORES.items())
    ]
    return [LOSS, *(scores or [Figure(name, title, ".2f") for name, title in SCORES.items()]), _STEPS]


def list_judged_figures(seeds: Iterable[Pairs]) -> list[Figure]:
    """Return the figures of the claims: the loss, and the scores with the narrowest beam."""
    figures = list_figures(seeds)
    narrowest = min((figure.beam for figure in figures if figure.beam is not None), default=None)
    return [figure for figure in figures if figure.is_judged and figure.beam in (None, narrowest)]


@dataclass(frozen=True)
class Means:
    """Means over the languages, which these are, and on how many of those that count the multilingual one is better."""

    bilingual: float
    multilingual: float
    num_better: int
    languages: Collection[str]


def pair_models(records: Sequence[Record]) -> dict[str, dict[int, dict[str, tuple[Trained, Trained]]]]:
    """Return the bilingual and the multilingual model by setting, seed and language.

    Only languages that both have with the same seed are in it.
    """
    multilingual = {(one.setting, one.run.seed): one for one in multilingual_trainings(records)}
    found: dict[str, dict[int, dict[str, tuple[Trained, Trained]]]] = {}
    for one in trainings(records, BILINGUAL):
        other = multilingual.get((one.setting, one.run.seed))
        if other is None or one.languages is None or len(one.languages) != 1:
            continue
        language = one.languages[0]
        if None not in (LOSS.of(one, language), LOSS.of(other, language)):
            found.setdefault(one.setting, {}).setdefault(one.run.seed, {})[language] = one, other
    return found


def pair_tested_models(records: Sequence[Record]) -> dict[str, dict[int, dict[str, tuple[Trained, Trained]]]]:
    """Return the same pairs of models without the languages whose test sets are too small for a mean."""
    found = {}
    for setting, seeds in pair_models(records).items():
        left_out = Corpus(records, setting).barely_tested
        found[setting] = {
            seed: {name: pair for name, pair in languages.items() if name not in left_out}
            for seed, languages in seeds.items()
        }
    return found


def group_pairs(records: Sequence[Record]) -> dict[str, dict[str, Mapping[int, Pairs]]]:
    """Return the pairs of models by setting, and then by group: of all languages, and of those with enough tests.

    The second group is there where it lacks some of the languages, and has any.
    """
    tested = pair_tested_models(records)
    found: dict[str, dict[str, Mapping[int, Pairs]]] = {}
    for setting, seeds in pair_models(records).items():
        found[setting] = {EVERY: seeds}
        if set() != list_languages(tested[setting]) != list_languages(seeds):
            found[setting][TESTED] = tested[setting]
    return found


def list_languages(seeds: Mapping[int, Pairs]) -> set[str]:
    """Return the languages of all seeds."""
    return {language for languages in seeds.values() for language in languages}


def find_means(languages: Pairs, figure: Figure, corpus: Corpus) -> Means | None:
    """Return the means of a figure over the languages that have it of both models, None without any."""
    both = _find_both(languages, figure, languages)
    if not both:
        return None
    ones, twos = (corpus.pool({language: pair[place] for language, pair in both.items()}) for place in (0, 1))
    better = sum(twos[name] < one if figure.less_is_better else twos[name] > one for name, one in ones.items())
    return Means(fmean(ones.values()), fmean(twos.values()), better, both.keys())


def find_gain(seeds: Mapping[int, Pairs], figure: Figure, languages: Iterable[str], corpus: Corpus) -> Interval | None:
    """Return the interval of the multilingual model's gain over seeds and some languages, None without any."""
    gains = gains_of(seeds, figure, sorted(languages))
    return over_seeds_and_parts({seed: corpus.pool(found) for seed, found in gains.items()})


def gains_of(seeds: Mapping[int, Pairs], figure: Figure, languages: Sequence[str]) -> dict[int, dict[str, float]]:
    """Return the multilingual model's gain by seed and language, where both models have the figure."""
    sign = -1 if figure.less_is_better else 1
    return {
        seed: {language: sign * (two - one) for language, (one, two) in _find_both(pairs, figure, languages).items()}
        for seed, pairs in seeds.items()
    }


def _find_both(pairs: Pairs, figure: Figure, languages: Iterable[str]) -> dict[str, tuple[float, float]]:
    """Return the figure of the bilingual and of the multilingual model, by language, where both have it."""
    found = {
        language: (figure.of(pairs[language][0], language), figure.of(pairs[language][1], language))
        for language in languages
        if language in pairs
    }
    return {language: (one, two) for language, (one, two) in found.items() if one is not None and two is not None}


def fit_gains(records: Sequence[Record], setting: str) -> dict[str, tuple[Figure, Line | None]]:
    """Return each figure and the line through its gains on all languages of a setting, by the figure's title.

    Languages that count as one are a point: the mean of their gains, at the geometric mean of their numbers of pairs.
    """
    seeds, corpus = pair_models(records)[setting], Corpus(records, setting)
    languages = sorted(list_languages(seeds) & corpus.pairs.keys())
    places = corpus.pool({language: log2(corpus.pairs[language]) for language in languages})
    return {
        figure.title: (
            figure,
            fit_line(
                {seed: corpus.pool(found) for seed, found in gains_of(seeds, figure, languages).items()},
                {language: 2**place for language, place in places.items()},
            ),
        )
        for figure in list_judged_figures(seeds.values())
    }


def list_gains(records: Sequence[Record], setting: str, title: str) -> Gains:
    """Return the multilingual model's gain of a setting in a figure, by seed and language."""
    seeds = pair_models(records)[setting]
    figure = next(figure for figure in list_judged_figures(seeds.values()) if figure.title == title)
    return gains_of(seeds, figure, sorted(list_languages(seeds)))
