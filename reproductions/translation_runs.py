"""The records of translation: trainings by setting, language and seed, with the scores of their translations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean, stdev
from typing import Any, NamedTuple

from gpipe.records import Record
from reproductions.table import newest

DEEP_OR_WIDE = "deep_or_wide_laptop"
PARAMETERS = "translation_parameters"
SCORING = "bleu"
SCORER = "bleu.py"


class Recipe(NamedTuple):
    """What a search for the best training of a model varies."""

    learning_rate: float
    dropout: float
    max_steps: int | None

    def __str__(self) -> str:
        steps = "" if self.max_steps is None else f", {self.max_steps:,} steps"
        return f"learning rate {self.learning_rate:g}, dropout {self.dropout:g}{steps}"


@dataclass(frozen=True)
class Trained:
    """A finished training, and the records of its translations' scores by beam.

    A language of None means all languages together, a beam of None the narrowest.
    """

    run: Record
    scored: Mapping[int, Record]

    @property
    def model(self) -> str:
        """The model's name, T(L, H, A), and its width."""
        model = self.run.config["model"]
        shape = ", ".join(str(model[name]) for name in ("num_layers", "feedforward_size", "num_heads"))
        return f"T({shape}), {model['model_size']} wide"

    @property
    def setting(self) -> str:
        """The model and the data's name."""
        return f"{self.model}, {self.run.config['data']['name']}"

    @property
    def languages(self) -> tuple[str, ...] | None:
        """The languages that it was trained on; None is all."""
        languages = self.run.config["data"].get("languages")
        return None if languages is None else tuple(languages)

    @property
    def recipe(self) -> Recipe:
        """Its learning rate, dropout and most steps."""
        config = self.run.config
        return Recipe(
            config["optimizer"]["learning_rate"], config["model"]["dropout"], config["trainer"].get("max_steps")
        )

    @property
    def is_unfinished(self) -> bool:
        """Whether its lowest loss is that at the limit of its steps."""
        return self.recipe.max_steps is not None and self.best("step") == self.recipe.max_steps

    def best(self, figure: str, language: str | None = None) -> float | None:
        """Return a figure of the evaluation with the lowest loss over all languages."""
        return _figure(self.run.results.get("least_loss") or self._last, figure, language)

    def last(self, figure: str) -> float | None:
        """Return a figure of the evaluation at the end."""
        return _figure(self._last, figure, None)

    def score(self, name: str, language: str, beam: int | None = None) -> float | None:
        """Return a score of a language's translations, from 0 to 100."""
        score: float | None = self._scores(beam).get(language, {}).get(name)
        return score

    def list_evaluated(self) -> list[str]:
        """Return the languages that have a loss of their own."""
        figures = self.run.results.get("least_loss") or self._last
        return sorted(name.removesuffix("/loss") for name in figures if name.endswith("/loss"))

    def pairs(self) -> dict[str, int]:
        """Return the number of training pairs of each language whose translations were scored."""
        return {language: scores["num_train_pairs"] for language, scores in self._scores(None).items()}

    @property
    def _last(self) -> Mapping[str, float]:
        return next(iter(self.run.results["evaluation"].values()), {})

    def _scores(self, beam: int | None) -> Mapping[str, Mapping[str, Any]]:
        record = self.scored.get(min(self.scored, default=0) if beam is None else beam)
        return {} if record is None else record.results["languages"]


def _figure(figures: Mapping[str, float], figure: str, language: str | None) -> float | None:
    return figures.get(figure if language is None else f"{language}/{figure}")


def trainings(records: Sequence[Record], experiment: str) -> list[Trained]:
    """Return an experiment's finished trainings that its tables compare, in the order of the records.

    Of several recipes for the same model, data, languages and mini-batch, that with the most seeds counts: the others
    are the search for it, see `searches`. With as many seeds each, that of the lowest loss counts.
    """
    return _separate(records, experiment)[0]


def searches(records: Sequence[Record], experiment: str) -> list[Trained]:
    """Return an experiment's finished trainings that are not among `trainings`: other recipes for the same models."""
    return _separate(records, experiment)[1]


def compare_recipes(
    records: Sequence[Record], experiment: str, setting: str | None = None
) -> dict[tuple[float, float], tuple[int, float]]:
    """Return how many models all recipes were tried on with the first seed, and the mean of their lowest losses.

    Recipes are a learning rate and a dropout, the best first; empty without a search.

    setting: of the models; None is all.
    """
    counted, others = (
        [one for one in found if setting in (None, one.setting)] for found in _separate(records, experiment)
    )
    losses: dict[tuple[float, float], dict[object, float]] = {}
    for one in (*counted, *others):
        if one.run.seed == 0 and (loss := one.best("loss")) is not None:
            losses.setdefault(one.recipe[:2], {})[_subject(one)] = loss
    tried = set.intersection(*map(set, losses.values())) if others and losses else set()
    means = {recipe: fmean(found[subject] for subject in tried) for recipe, found in losses.items() if tried}
    return {recipe: (len(tried), means[recipe]) for recipe in sorted(means, key=lambda recipe: means[recipe])}


def is_tuned(records: Sequence[Record], experiment: str) -> bool:
    """Return whether the trainings that tables compare have the recipe that a search found best."""
    best = next(iter(compare_recipes(records, experiment)), None)
    return {one.recipe[:2] for one in trainings(records, experiment)} == {best}


def _finished(records: Sequence[Record], experiment: str) -> list[Trained]:
    """Return an experiment's finished trainings, in the order of the records.

    The last one counts among trainings with the same subject, recipe and seed, and among scores with the same beam.
    """
    scored: dict[object, list[Record]] = {}
    for record in records:
        if is_score(record, "test"):
            scored.setdefault(_part(record), []).append(record)
    found: dict[object, Trained] = {}
    for run in records:
        if run.experiment == experiment and run.kind == "measured" and run.results.get("evaluation"):
            same = scored.get(_part(run), ())  # a setting may have come between a training and its score
            own = [record for record in same if not _differ(record.settings, run.settings)]
            one = Trained(run, {record.results["num_beams"]: record for record in own})
            key = _subject(one), one.recipe, run.seed
            found.pop(key, None)
            found[key] = one
    return list(found.values())


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two records differ in a setting that both have; unlike `differences`, end at the first."""
    for name in one.keys() & other.keys():
        here, there = one[name], other[name]
        if isinstance(here, dict) and isinstance(there, dict):
            if _differ(here, there):
                return True
        elif here != there and not isinstance(here, dict) and not isinstance(there, dict):
            return True
    return False


def _separate(records: Sequence[Record], experiment: str) -> tuple[list[Trained], list[Trained]]:
    """Return the trainings that count, and the search for their recipes."""
    every = _finished(records, experiment)
    found: dict[object, dict[Recipe, list[Trained]]] = {}
    for one in every:
        found.setdefault(_subject(one), {}).setdefault(one.recipe, []).append(one)
    best = {
        subject: max(recipes, key=lambda recipe: (len(recipes[recipe]), -_least_loss(recipes[recipe])))
        for subject, recipes in found.items()
    }
    counted = [one for one in every if one.recipe == best[_subject(one)]]
    return counted, [one for one in every if one.recipe != best[_subject(one)]]


def _subject(one: Trained) -> tuple[str, tuple[str, ...] | None, int]:
    """Return what recipes are compared on: the model and data, the languages, and the mini-batch."""
    return one.setting, one.languages, one.run.config["trainer"]["batch_size"]


def _least_loss(found: Sequence[Trained]) -> float:
    loss = mean(one.best("loss") for one in found)
    return inf if loss is None else loss


def compare_beams(records: Sequence[Record], *, is_of_all: bool) -> dict[int, tuple[int, float]]:
    """Return, by beam, how many languages' validation sets were translated, and their mean chrF.

    is_of_all: by models of all languages, or by models of one language each.
    """
    found: dict[int, dict[str, float]] = {}
    for record in records:
        if is_score(record, "valid") and (Trained(record, {}).languages is None) == is_of_all:
            chrf = {language: row["chrf"] for language, row in record.results["languages"].items()}
            found.setdefault(record.results["num_beams"], {}).update(chrf)
    return {beam: (len(scores), fmean(scores.values())) for beam, scores in sorted(found.items())}


def is_score(record: Record, split: str) -> bool:
    """Return whether a record has scores of a split: those of a validation set choose a beam, and are no results."""
    is_score = record.experiment == SCORING and record.kind == "measured"
    return is_score and record.results.get("split", "test") == split


def _part(record: Record) -> tuple[int, tuple[str, ...] | None]:
    """Return a cheap key that a training shares with its scores, and with few other trainings."""
    return record.seed, Trained(record, {}).languages


def beams(found: Iterable[Trained]) -> list[int]:
    """Return the beams of all the trainings' translations, the narrowest first."""
    return sorted({beam for one in found for beam in one.scored})


def describe_search(beam: int) -> str:
    """Name the search of a beam."""
    return "greedy" if beam == 1 else f"beam {beam}"


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None without any."""
    found = [value for value in values if value is not None]
    return fmean(found) if found else None


def spread(values: Iterable[float | None], form: str, sign: str = "") -> str:
    """Write the mean of the values that are not None and, for several, their sample deviation; zero has no minus."""
    found = [value for value in values if value is not None]
    if not found:
        return ""
    return f"{fmean(found):{sign}z{form}}" + (f" ± {stdev(found):{form}}" if len(found) > 1 else "")


def planned_models(records: Sequence[Record], part: str) -> dict[tuple[int, ...], dict[str, Any]]:
    """Return the rows of a part of the newest plan by the model's L, H and A; empty without one."""
    record = newest(records, PARAMETERS)
    rows = [] if record is None else record.results[part]
    return {shape_of(row): row for row in rows}


def shape_of(row: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the L, H and A of a model."""
    return tuple(int(row[name]) for name in ("num_layers", "feedforward_size", "num_heads"))
