"""The tables of section 5 of the paper and its figure 3: one model of all languages, beside a model of each."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from gpipe.results.records import Record
from gpipe.results.tables import Paper, markdown, named, newest, not_run, provenance
from gpipe.results.translation_runs import (
    DEEP_OR_WIDE,
    SCORER,
    Trained,
    beams,
    mean,
    searched,
    spread,
    training_pairs,
    trainings,
    verdict,
    written,
)

PARAMETERS = "translation_parameters"
PAPER_SCALE = "transformer_multilingual"
MULTILINGUAL = "transformer_multilingual_laptop"
BILINGUAL = "bilingual_laptop"
_COMMANDS = (
    f"train.py -m +experiment={PAPER_SCALE} scale=laptop seed=0,1,2 and train.py -m +experiment=bilingual scale=laptop"
)
_UNITS = {"M": 1e6, "B": 1e9}

Pairs = Mapping[str, tuple[Trained, Trained]]
"""The bilingual and the multilingual model of a seed, by the bilingual one's language."""


def figure3_models(records: Sequence[Record], paper: Paper) -> str:
    """Return the paper's models: its parameters and ours, and its average BLEU as read off figure 1(b) beside ours."""
    planned = planned_models(records, "models")
    if not planned:
        return not_run(f"experiments/{PARAMETERS}.py")
    runs = trainings(records, PAPER_SCALE)
    rows = []
    for row in paper:
        shape = tuple(int(row[name]) for name in ("num_layers", "feedforward_size", "num_heads"))
        plan = planned[shape]
        ours, bleu = plan["parameters"], _paper_scale_bleu(runs, shape)
        count = as_number(row["parameters"])
        rows.append(
            [
                f"T({', '.join(map(str, shape))})",
                row["parameters"],
                f"{ours:,}",
                f"{ours / count - 1:+.2%}",
                str(plan["num_stages"]),
                f"{plan['parameter_bytes'] / 2**30:.2f}",
                row["bleu"],
                bleu or "not run",
            ]
        )
    header = ["model", "parameters: paper", "ours, planned", "off the paper", "K", "GiB of weights, planned"]
    return markdown([*header, "BLEU: paper, read off", "ours, measured"], rows)


def figure3_low_resource(records: Sequence[Record]) -> str:
    """Return how one multilingual model does beside bilingual ones of its size, on the languages that have these.

    A row a figure and seed, then one of all seeds; each number is a mean over the languages, each model at its least
    validation loss.
    """
    tables = []
    for setting, seeds in compared(records).items():
        rows = []
        for figure in _figures(seeds.values()):
            means = {seed: found for seed in sorted(seeds) if (found := _means(seeds[seed], figure))}
            rows += [
                [figure.title, str(seed), str(found.num_languages), *_cells([found], figure), ""]
                for seed, found in means.items()
            ]
            rows.append([figure.title, f"all {len(means)}", "", *_cells(list(means.values()), figure)])
            rows[-1].append(verdict(found.gain(figure) for found in means.values()) if figure.is_judged else "")
            if not means:
                rows[-1][-1] = f"not run: {SCORER}"
        header = [setting, "seed", "languages", "bilingual", "multilingual", "difference", "multilingual is better on"]
        tables.append(markdown([*header, "verdict"], rows))
    return "\n".join(tables) or not_run(_COMMANDS)


def figure3_languages(records: Sequence[Record]) -> str:
    """Return the same language by language, means over the seeds, the languages with the fewest pairs first.

    Scores are those of the narrowest beam.
    """
    tables = []
    for setting, seeds in compared(records).items():
        pairs, rows = training_pairs(records, setting.rpartition(", ")[2]), []
        figures = [_LOSS, *(_Figure(name, title, ".1f") for name, title in _SCORES.items())]
        languages = {language for found in seeds.values() for language in found}
        for language in sorted(languages, key=lambda language: (pairs.get(language, 0), language)):
            both = [found[language] for found in seeds.values() if language in found]
            cells = [
                written(mean(figure.of(pair[place], language) for pair in both), figure.form)
                for figure in figures
                for place in (0, 1)
            ]
            rows.append([language, written(pairs.get(language), ","), str(len(both)), *cells])
        header = [setting, "training pairs", "seeds"]
        header += [f"{name}: {one}" for name in ("loss", "chrF", "BLEU") for one in ("bilingual", "multilingual")]
        tables.append(markdown(header, rows))
    return "\n".join(tables) or not_run(_COMMANDS)


def figure3_run(records: Sequence[Record]) -> str:
    """Return where the newest of the small multilingual models was trained, and on what."""
    runs = [one.run for one in multilingual_trainings(records)]
    return provenance(max(runs, key=lambda run: run.date, default=None), _COMMANDS)


def multilingual_trainings(records: Sequence[Record]) -> list[Trained]:
    """Return the small models of all languages; those that deep_or_wide compares are such trainings too."""
    found: dict[tuple[str, int], Trained] = {}
    for experiment in (DEEP_OR_WIDE, MULTILINGUAL):
        found |= {(one.setting, one.run.seed): one for one in trainings(records, experiment)}
    return list(found.values())


@dataclass(frozen=True)
class _Figure:
    """A figure of both models, as a row shows it."""

    name: str
    title: str
    form: str
    beam: int | None = None
    less_is_better: bool = False
    is_judged: bool = True

    def of(self, one: Trained, language: str) -> float | None:
        """Return the figure of a model on a language."""
        if self.name in _SCORES:
            return one.score(self.name, language, self.beam)
        return one.best(self.name, language if self.is_judged else None)


_SCORES = {"chrf": "chrF", "bleu": "BLEU"}
_LOSS = _Figure("loss", "least loss, nats a token", ".3f", less_is_better=True)
_STEPS = _Figure("step", "steps to the least loss", ".0f", is_judged=False)


def _figures(seeds: Iterable[Pairs]) -> list[_Figure]:
    """Return the figures to compare: scores by the beams that there are."""
    found = beams(one for pairs in seeds for pair in pairs.values() for one in pair)
    scores = [
        _Figure(name, f"{title}, {searched(beam)}", ".2f", beam)
        for beam, (name, title) in itertools.product(found, _SCORES.items())
    ]
    return [_LOSS, *(scores or [_Figure(name, title, ".2f") for name, title in _SCORES.items()]), _STEPS]


@dataclass(frozen=True)
class _Means:
    """Means over the languages, on how many of them the multilingual model is better, and how many there are."""

    bilingual: float
    multilingual: float
    num_better: int
    num_languages: int

    def gain(self, figure: _Figure) -> float:
        """Return by how much the multilingual model is better."""
        difference = self.multilingual - self.bilingual
        return -difference if figure.less_is_better else difference


def compared(records: Sequence[Record]) -> dict[str, dict[int, dict[str, tuple[Trained, Trained]]]]:
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
        if None not in (_LOSS.of(one, language), _LOSS.of(other, language)):
            found.setdefault(one.setting, {}).setdefault(one.run.seed, {})[language] = one, other
    return found


def planned_models(records: Sequence[Record], part: str) -> dict[tuple[int, ...], dict[str, Any]]:
    """Return the rows of a part of the newest plan by the model's L, H and A; empty without one."""
    record = newest(list(records), PARAMETERS)
    rows = [] if record is None else record.results[part]
    return {tuple(row[name] for name in ("num_layers", "feedforward_size", "num_heads")): row for row in rows}


def as_number(printed: str) -> float:
    """Return a number printed with a unit, such as 408M or 1.24B."""
    return float(printed[:-1]) * _UNITS[printed[-1]]


def _paper_scale_bleu(runs: Iterable[Trained], shape: tuple[int, ...]) -> str:
    """Return the average BLEU of the trainings of a model at the paper's scale, with its deviation."""
    names = ("num_layers", "feedforward_size", "num_heads")
    found = [one for one in runs if tuple(one.run.config["model"][name] for name in names) == shape]
    return spread([mean(one.score("bleu", language) for language in one.pairs()) for one in found], ".1f")


def _means(languages: Pairs, figure: _Figure) -> _Means | None:
    """Return the means of a figure over the languages that have it of both models, None without any."""
    found = [(figure.of(one, language), figure.of(two, language)) for language, (one, two) in languages.items()]
    pairs = [(one, two) for one, two in found if one is not None and two is not None]
    if not pairs:
        return None
    better = sum(two < one if figure.less_is_better else two > one for one, two in pairs)
    return _Means(fmean(one for one, _ in pairs), fmean(two for _, two in pairs), better, len(pairs))


def _cells(means: Sequence[_Means], figure: _Figure) -> list[str]:
    """Write the means of one or several seeds."""
    both = [[found.bilingual for found in means], [found.multilingual for found in means]]
    cells = [spread(values, figure.form) for values in both]
    cells.append(spread([found.multilingual - found.bilingual for found in means], figure.form, "+"))
    better = f"{fmean(found.num_better for found in means):.3g}" if means and figure.is_judged else ""
    return [*cells, better]


BESIDE_PAPER = named(figure3_models)
TABLES = named(figure3_low_resource, figure3_languages, figure3_run)
