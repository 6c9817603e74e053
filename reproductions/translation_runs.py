"""The records of translation: trainings by setting, language and seed, with the scores of their translations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from gpipe.records import Record, same_settings
from reproductions.table import newest

DEEP_OR_WIDE = "deep_or_wide_laptop"
PARAMETERS = "translation_parameters"
SCORING = "bleu"
SCORER = "bleu.py"


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

    def best(self, figure: str, language: str | None = None) -> float | None:
        """Return a figure of the evaluation with the least loss over all languages."""
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
    """Return an experiment's finished trainings, in the order of the records.

    The last one counts among trainings with the same model, data, languages, mini-batch and seed, and among scores with
    the same beam.
    """
    scored = [record for record in records if record.experiment == SCORING and record.kind == "measured"]
    found: dict[object, Trained] = {}
    for run in records:
        if run.experiment == experiment and run.kind == "measured" and run.results.get("evaluation"):
            one = Trained(run, {record.results["num_beams"]: record for record in scored if _is_of(record, run)})
            key = one.setting, one.languages, run.config["trainer"]["batch_size"], run.seed
            found.pop(key, None)
            found[key] = one
    return list(found.values())


def _is_of(scored: Record, run: Record) -> bool:
    one, other = Trained(scored, {}), Trained(run, {})
    same = (scored.seed, one.languages) == (run.seed, other.languages)  # most differ in these
    return same and same_settings(scored.config, run.config)


def training_pairs(records: Iterable[Record], data: str) -> dict[str, int]:
    """Return the number of training pairs of each language of a data set, from the last record of its scores."""
    found: dict[str, int] = {}
    for record in records:
        if record.experiment == SCORING and record.kind == "measured" and record.config["data"]["name"] == data:
            found |= {language: row["num_train_pairs"] for language, row in record.results["languages"].items()}
    return found


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
    """Write the mean of the values that are not None and, for several, their sample deviation."""
    found = [value for value in values if value is not None]
    if not found:
        return ""
    return f"{fmean(found):{sign}{form}}" + (f" ± {stdev(found):{form}}" if len(found) > 1 else "")


def format_value(value: float | None, form: str) -> str:
    """Write a number, or nothing for None."""
    return "" if value is None else f"{value:{form}}"


def planned_models(records: Sequence[Record], part: str) -> dict[tuple[int, ...], dict[str, Any]]:
    """Return the rows of a part of the newest plan by the model's L, H and A; empty without one."""
    record = newest(records, PARAMETERS)
    rows = [] if record is None else record.results[part]
    return {shape_of(row): row for row in rows}


def shape_of(row: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the L, H and A of a model."""
    return tuple(int(row[name]) for name in ("num_layers", "feedforward_size", "num_heads"))
