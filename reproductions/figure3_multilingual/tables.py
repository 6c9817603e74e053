"""The tables of section 5 of the paper and its figure 3: one model of all languages beside one model per language."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from gpipe.records import Record
from reproductions import paper_scale
from reproductions.claims import NOT_RUN, Claim, format_verdicts
from reproductions.figure3_multilingual import depth, text_scale
from reproductions.table import Paper, markdown, not_run, provenance, rounds_to
from reproductions.translation_runs import (
    DEEP_OR_WIDE,
    PARAMETERS,
    SCORER,
    SCORING,
    Trained,
    beams,
    describe_search,
    format_value,
    mean,
    planned_models,
    shape_of,
    spread,
    training_pairs,
    trainings,
)
from reproductions.verdict import Interval, over_seeds_and_parts

PAPER_SCALE = ("transformer_multilingual", "deep_or_wide")
NUM_TABLES = {1: "1 table", 2: "2 tables", 3: "3 tables"}
"""Embedding-sized tables of source, target and softmax layer: all tied, the two inputs tied, none tied."""
MULTILINGUAL = "transformer_multilingual_laptop"
BILINGUAL = "bilingual_laptop"
_COMMANDS = f"train.py -m +experiment={PAPER_SCALE[0]}_laptop seed=0,1,2 and train.py -m +experiment=bilingual_laptop"
_NAMES = ("6_8192_16", "12_16384_32", "24_8192_16", "32_16384_32", "64_16384_32")

Pairs = Mapping[str, tuple[Trained, Trained]]
"""The bilingual and the multilingual model of a seed, by the bilingual one's language."""


def figure3_models(records: Sequence[Record], paper: Paper) -> str:
    """Return the paper's parameters beside our counts for each way of tying, and average BLEU beside ours.

    The paper does not print its BLEU: a third party read it off figure 1(b).
    """
    planned = planned_models(records, "models")
    if not planned:
        return not_run(f"python -m experiments.{PARAMETERS}")
    runs = _paper_scale_trainings(records)
    rows = []
    for row in paper:
        shape = shape_of(row)
        plan = planned[shape]
        counts = {int(tables): count for tables, count in plan["parameters_by_tables"].items()}
        agreeing = [str(tables) for tables, count in counts.items() if rounds_to(count, row["parameters"])]
        rows.append(
            [
                f"T({', '.join(map(str, shape))})",
                row["parameters"],
                *(f"{counts[tables]:,}" for tables in NUM_TABLES),
                " and ".join(agreeing) or "none",
                str(plan["num_stages"]),
                f"{plan['parameter_bytes'] / 2**30:.2f}",
                row["bleu_read_off_by_third_party"],
                _paper_scale_bleu(runs, shape) or NOT_RUN,
            ]
        )
    header = ["model", "parameters: paper", *(f"ours, planned, {name}" for name in NUM_TABLES.values())]
    header += ["tables whose count rounds to the paper's", "K", "GiB of weights, 2 tables, planned"]
    return markdown([*header, "BLEU: third party's reading", "BLEU: ours, measured"], rows)


def figure3_other_settings(records: Sequence[Record]) -> str:
    """Return the runs with a paper-scale name but other settings."""
    return paper_scale.other_settings(records, PAPER_SCALE, _differences)


def claims(records: Sequence[Record], paper: Paper) -> list[Claim]:
    """Return the largest model beside the paper's, and the claims of section 5 at laptop scale."""
    largest = paper[-1]
    reading = f"BLEU {largest['bleu_read_off_by_third_party']}, a third party's reading"
    planned = planned_models(records, "models").get(shape_of(largest))
    bleu = _paper_scale_bleu(_paper_scale_trainings(records), shape_of(largest))
    rows = [
        Claim(
            f"the largest of the models of 102 languages, T({', '.join(map(str, shape_of(largest)))}) (section 5)",
            f"{largest['parameters']} parameters; {reading}",
            f"BLEU {bleu}" if bleu else NOT_RUN,
            planned=f"{planned['parameters'] / 1e9:.2f}B parameters" if planned else "",
        )
    ]
    for seeds in pair_models(records).values():
        narrowest = min(beams(one for pairs in seeds.values() for pair in pairs.values() for one in pair), default=None)
        found = {
            figure.title: (figure, _gain(seeds, figure))
            for figure in _figures(seeds.values())
            if figure.is_judged and figure.beam in (None, narrowest)
        }
        rows.append(
            Claim(
                "one model of 102 languages beats one per language where examples are few, at laptop scale (section 5)",
                "better on nearly all languages",
                "; ".join(
                    f"{title} {interval.mean:+{figure.form}}"
                    for title, (figure, interval) in found.items()
                    if interval is not None
                ),
                verdict=format_verdicts(((title, interval) for title, (_, interval) in found.items()), ".2f"),
            )
        )
    return [*rows, *depth.claims(records, paper)]


def figure3_low_resource(records: Sequence[Record]) -> str:
    """Compare one multilingual model with bilingual ones of its size, on the languages that have these.

    There is one row per figure and seed, then one for all seeds. Each number is a mean over the languages, with each
    model at its least validation loss.
    """
    tables = []
    for setting, seeds in pair_models(records).items():
        rows = []
        for figure in _figures(seeds.values()):
            means = {seed: found for seed in sorted(seeds) if (found := _means(seeds[seed], figure))}
            rows += [
                [figure.title, str(seed), str(found.num_languages), *_cells([found], figure), ""]
                for seed, found in means.items()
            ]
            rows.append([figure.title, f"all {len(means)}", "", *_cells(list(means.values()), figure)])
            interval = _gain(seeds, figure) if figure.is_judged else None
            rows[-1].append("" if interval is None else interval.describe(figure.form))
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
    for setting, seeds in pair_models(records).items():
        pairs, rows = training_pairs(records, setting.rpartition(", ")[2]), []
        figures = [_LOSS, *(_Figure(name, title, ".1f") for name, title in _SCORES.items())]
        languages = {language for found in seeds.values() for language in found}
        for language in sorted(languages, key=lambda language: (pairs.get(language, 0), language)):
            both = [found[language] for found in seeds.values() if language in found]
            cells = [
                format_value(mean(figure.of(pair[place], language) for pair in both), figure.form)
                for figure in figures
                for place in (0, 1)
            ]
            rows.append([language, format_value(pairs.get(language), ","), str(len(both)), *cells])
        header = [setting, "training pairs", "seeds"]
        header += [f"{name}: {one}" for name in ("loss", "chrF", "BLEU") for one in ("bilingual", "multilingual")]
        tables.append(markdown(header, rows))
    return "\n".join(tables) or not_run(_COMMANDS)


def figure3_run(records: Sequence[Record]) -> str:
    """Return the provenance of the newest small multilingual model."""
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
_LOSS = _Figure("loss", "least loss, nats per token", ".3f", less_is_better=True)
_STEPS = _Figure("step", "steps to the least loss", ".0f", is_judged=False)


def _figures(seeds: Iterable[Pairs]) -> list[_Figure]:
    """Return the figures to compare, with the scores of each beam."""
    found = beams(one for pairs in seeds for pair in pairs.values() for one in pair)
    scores = [
        _Figure(name, f"{title}, {describe_search(beam)}", ".2f", beam)
        for beam, (name, title) in itertools.product(found, _SCORES.items())
    ]
    return [_LOSS, *(scores or [_Figure(name, title, ".2f") for name, title in _SCORES.items()]), _STEPS]


@dataclass(frozen=True)
class _Means:
    """Means over the languages; on how many the multilingual model is better, and how many there are."""

    bilingual: float
    multilingual: float
    num_better: int
    num_languages: int


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
        if None not in (_LOSS.of(one, language), _LOSS.of(other, language)):
            found.setdefault(one.setting, {}).setdefault(one.run.seed, {})[language] = one, other
    return found


def _differences(run: Record) -> list[str]:
    """Return the settings in which a run departs from its model's paper-scale run, or from that of T(6, 8192, 16)."""
    name = "_".join(map(str, shape_of(run.config["model"])))
    model = f"translation_t{name}" if name in _NAMES else "translation_t6_8192_16"
    return paper_scale.differences(run, [f"+experiment={run.experiment}", f"model={model}"])


def _paper_scale_trainings(records: Sequence[Record]) -> list[Trained]:
    counting = paper_scale.paper_scale(records, PAPER_SCALE, _differences)
    scores = [record for record in records if record.experiment == SCORING]
    return [one for experiment in PAPER_SCALE for one in trainings([*counting, *scores], experiment)]


def _paper_scale_bleu(runs: Iterable[Trained], shape: tuple[int, ...]) -> str:
    """Return the average BLEU of the trainings of a model at the paper's scale, with its deviation."""
    found = [one for one in runs if shape_of(one.run.config["model"]) == shape]
    return spread([mean(one.score("bleu", language) for language in one.pairs()) for one in found], ".1f")


def _means(languages: Pairs, figure: _Figure) -> _Means | None:
    """Return the means of a figure over the languages that have it of both models, None without any."""
    found = [(figure.of(one, language), figure.of(two, language)) for language, (one, two) in languages.items()]
    pairs = [(one, two) for one, two in found if one is not None and two is not None]
    if not pairs:
        return None
    better = sum(two < one if figure.less_is_better else two > one for one, two in pairs)
    return _Means(fmean(one for one, _ in pairs), fmean(two for _, two in pairs), better, len(pairs))


def _gain(seeds: Mapping[int, Pairs], figure: _Figure) -> Interval | None:
    """Return the interval of the multilingual model's gain over seeds and languages, None without any."""
    gains: dict[int, dict[str, float]] = {}
    for seed, languages in seeds.items():
        both = {
            language: (figure.of(one, language), figure.of(two, language)) for language, (one, two) in languages.items()
        }
        sign = -1 if figure.less_is_better else 1
        gains[seed] = {
            language: sign * (two - one) for language, (one, two) in both.items() if one is not None and two is not None
        }
    return over_seeds_and_parts(gains)


def _cells(means: Sequence[_Means], figure: _Figure) -> list[str]:
    """Write the means over one or several seeds."""
    both = [[found.bilingual for found in means], [found.multilingual for found in means]]
    cells = [spread(values, figure.form) for values in both]
    cells.append(spread([found.multilingual - found.bilingual for found in means], figure.form, "+"))
    better = f"{fmean(found.num_better for found in means):.3g}" if means and figure.is_judged else ""
    return [*cells, better]


TABLES = (
    figure3_models,
    figure3_other_settings,
    figure3_low_resource,
    figure3_languages,
    figure3_run,
    *depth.TABLES,
    *text_scale.TABLES,
)
