"""The tables of section 5 of the paper on depth: deep or wide at equal size, and what lets 128 layers train."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import log2
from typing import Any

import numpy as np

from gpipe.records import Record
from reproductions.claims import Claim, format_gains, format_verdicts
from reproductions.corpus import Corpus
from reproductions.table import Paper, markdown, not_run
from reproductions.translation_runs import (
    DEEP_OR_WIDE,
    PARAMETERS,
    SCORER,
    Trained,
    beams,
    describe_search,
    mean,
    planned_models,
    shape_of,
    spread,
    trainings,
)
from reproductions.verdict import Interval, over_seeds_and_parts

NOT_DRAWN = "intervals over seeds and languages, not over lines"
NO_PAIR = "no test: no seed ended both with the measures and without them"
DEEP_TRAINING = "deep_training_laptop"
STUDY = "python -m experiments.deep_or_wide"
_FIGURES = {"loss": ".3f", "top1": ".2%", "chrf": ".2f", "bleu": ".2f"}
_BARELY_TESTED = "low, small test sets too"
_TITLES = {"loss": "loss", "top1": "token accuracy", "chrf": "chrF", "bleu": "BLEU"}


def deep_or_wide(records: Sequence[Record]) -> str:
    """Compare models of equal size, from wide to deep, by resource group: means and deviations over the seeds.

    Every number of a model is a mean over the languages with enough test sentences, but for those of a group that says
    that it has all; scores are with the narrowest beam. Lines over the depth are of models of the same seed. Where the
    training of a model is unfinished, the last column has the verdict of the others.
    """
    tables = []
    for data, depths in models_by_depth(records).items():
        models, corpus = list(depths.values()), Corpus(records, data[0])
        groups = dict(corpus.tested_groups)
        groups["all"] = groups["all"] or next(iter(models[0].values())).list_evaluated()  # before anything is scored
        if set(corpus.groups["low"]) != set(groups["low"]):
            groups[_BARELY_TESTED] = corpus.groups["low"]
        unfinished, finished = find_unfinished(depths), list_finished(depths)
        searches = [describe_search(beam) for beam in beams(one for found in models for one in found.values())]
        search = next(iter(searches), None)
        rows = []
        for name, group in itertools.product(_FIGURES, groups):
            values = [[average(one, name, groups[group], corpus) for one in found.values()] for found in models]
            gains = gains_per_doubling(depths, name, groups[group], corpus)
            means = [mean(found.values()) for found in gains.values()]
            cells = [*(spread(of, _FIGURES[name]) for of in values), spread(means, _FIGURES[name], "+")]
            interval = _interval(name, gains)
            title = f"{_TITLES[name]}, {search}" if search and name in ("chrf", "bleu") else _TITLES[name]
            verdict = f"not run: {SCORER}" if interval is None else interval.describe(_FIGURES[name])
            num_seeds = sum(map(bool, gains.values())) or len(gains)
            rows.append([title, f"{group}, {corpus.describe_number(groups[group])}", *cells, str(num_seeds), verdict])
            if finished:
                rest = _interval(name, gains_per_doubling(finished, name, groups[group], corpus))
                rows[-1].append("" if rest is None else rest.describe(_FIGURES[name]))
        names = [next(iter(found.values())).model for found in models]
        header = [data[0], "languages", *names, "each doubling of the depth adds", "seeds", "deep is better"]
        header += [f"without {_name_models(unfinished)}"] if finished else []
        missing = "; ".join(_name(row) for row in planned_models(records, "laptop").values() if _name(row) not in names)
        tables.append(markdown(header, rows) + (f"\nNot run: {missing}.\n" if missing else ""))
    return "\n".join(tables) or not_run(STUDY)


def claims(records: Sequence[Record], paper: Paper) -> list[Claim]:
    """Return the paper's claims on depth at laptop scale, beside its own numbers."""
    bleu = {row["num_layers"]: row["bleu_read_off_by_third_party"] for row in paper}
    rows = []
    for data, depths in models_by_depth(records).items():
        corpus, unfinished = Corpus(records, data[0]), find_unfinished(depths)
        low = corpus.tested_groups["low"]
        extent = corpus.describe_pairs(low)
        forms = {title: _FIGURES[name] for name, title in _TITLES.items()}
        for compared, without in ((depths, ()), (list_finished(depths), unfinished)):
            if not compared:
                continue
            found = {
                title: _interval(name, gains_per_doubling(compared, name, low, corpus))
                for name, title in _TITLES.items()
            }
            rows.append(
                Claim(
                    "deep beats wide at equal size on low-resource languages, at laptop scale (section 5)",
                    f"BLEU over all languages {bleu['24']} against {bleu['12']}, a third party's reading",
                    f"gain with each doubling of the depth, {len(compared)} depths: {format_gains(found, forms)}",
                    verdict=format_verdicts(found.items(), forms),
                    scope=NOT_DRAWN
                    + (f": {corpus.describe_number(low, 'language')} with {extent}" if extent else "")
                    + (f", without {_name_models(without)}, whose training is unfinished" if without else ""),
                )
            )
    settings = deep_trainings(records)
    if settings:
        losses = [_compare_losses(*both) for both in settings.items()]
        is_compared = any(interval is not None for _, interval in losses)
        rows.append(
            Claim(
                "scaled initialisation and clipped logits let deep models train, at laptop scale (section 5)",
                "without them, gradients that destroy the learning progress",
                "; ".join(
                    f"{measures}: "
                    + ", ".join(f"{count} of {len(runs)} {text}" for text, count in _count_outcomes(runs).items())
                    for measures, runs in _group_by_measures(settings).items()
                ),
                verdict=format_verdicts(losses, ".3f") if is_compared else NO_PAIR,
                scope="intervals over seeds, not over validation lines",
            )
        )
    return rows


def find_unfinished(depths: Mapping[int, Mapping[int, Trained]]) -> list[Trained]:
    """Return a training of each model whose lowest loss is that at the limit of its steps, with every seed."""
    return [
        next(iter(models.values()))
        for models in depths.values()
        if models and all(one.is_unfinished for one in models.values())
    ]


def list_finished(depths: Mapping[int, Mapping[int, Trained]]) -> dict[int, Mapping[int, Trained]]:
    """Return the other depths; empty where all are finished, or where fewer than two are."""
    unfinished = {one.run.config["model"]["num_layers"] for one in find_unfinished(depths)}
    rest = {depth: models for depth, models in depths.items() if depth not in unfinished}
    return rest if unfinished and len(rest) > 1 else {}


def deep_or_wide_models(records: Sequence[Record]) -> str:
    """Return the models' numbers of parameters without their tables."""
    rows = [[_name(row), f"{row['parameters_beside_tables']:,}"] for row in planned_models(records, "laptop").values()]
    if not rows:
        return not_run(f"python -m experiments.{PARAMETERS}")
    return markdown(["model", "parameters besides the embedding tables, planned"], rows)


def models_by_depth(records: Sequence[Record]) -> dict[tuple[str, int], dict[int, dict[int, Trained]]]:
    """Return the trainings by number of layers, the fewest first, and by seed, for each data set and model_size.

    What has one depth alone is left out.
    """
    found: dict[tuple[str, int], dict[int, dict[int, Trained]]] = {}
    for one in trainings(records, DEEP_OR_WIDE):
        config = one.run.config
        depths = found.setdefault((config["data"]["name"], config["model"]["model_size"]), {})
        depths.setdefault(config["model"]["num_layers"], {})[one.run.seed] = one
    return {data: dict(sorted(depths.items())) for data, depths in found.items() if len(depths) > 1}


def gains_per_doubling(
    depths: Mapping[int, Mapping[int, Trained]], name: str, languages: Iterable[str], corpus: Corpus
) -> dict[int, dict[str, float]]:
    """Return what each doubling of the depth adds to a figure, by the seeds that all depths have, and by language.

    It is the slope of a line of least squares over the logarithm of the number of layers. A language that a model has
    no figure of is left out.
    """
    languages, places = list(languages), [log2(depth) for depth in depths]
    gains = {}
    for seed in sorted(set.intersection(*(set(models) for models in depths.values()))):
        figures = [_figures(models[seed], name, languages) for models in depths.values()]
        shared = [language for language in languages if all(language in found for found in figures)]
        slopes = (np.polyfit(places, [found[language] for found in figures], 1)[0] for language in shared)
        gains[seed] = corpus.pool(dict(zip(shared, map(float, slopes), strict=True)))
    return gains


def tested_groups(records: Sequence[Record], data: str) -> dict[str, list[str]]:
    """Return the resource groups of a data set's languages, without the languages that are barely tested."""
    return Corpus(records, data).tested_groups


def deep_training(records: Sequence[Record]) -> str:
    """Return how a model of many layers trains with and without the paper's two measures.

    Means and deviations are over the seeds that finished. The gradient norm is the largest of any step and seed.
    """
    tables = []
    for setting, ways in deep_trainings(records).items():
        rows = [_deep_row(scaled, limit, runs) for (scaled, limit), runs in ways.items()]
        header = [f"{setting}; feed-forward initialisation scaled", "logits clipped at", "seeds"]
        header += ["validation loss, end", "least", "training NLL, first steps", "last steps", "largest rise"]
        tables.append(markdown([*header, "largest gradient norm", "logits clipped", "outcome: seeds"], rows))
    return "\n".join(tables) or not_run(f"train.py -m +experiment={DEEP_TRAINING}")


def deep_trainings(records: Sequence[Record]) -> dict[str, dict[tuple[bool, float | None], list[Record]]]:
    """Return the trainings of deep models, diverged ones too, by setting, and by scaled initialisation and logit limit.

    A setting is a model, data and recipe. Trainings with both measures come first, those with neither last. The
    last one counts among trainings with the same seed.
    """
    found: dict[str, dict[tuple[bool, float | None], dict[int, Record]]] = {}
    for run in records:
        if run.experiment == DEEP_TRAINING and run.kind == "measured":
            model, one = run.config["model"], Trained(run, {})
            ways = found.setdefault(f"{one.setting}, {one.recipe}", {})
            ways.setdefault((model["scale_feedforward"], model["logit_limit"]), {})[run.seed] = run
    return {
        setting: {
            (scaled, limit): [run for _, run in sorted(ways[scaled, limit].items())]
            for scaled, limit in sorted(ways, key=lambda way: (not way[0], way[1] is None, way[1] or 0))
        }
        for setting, ways in found.items()
    }


def describe_outcome(run: Record) -> str:
    """Say whether a training trained, learnt nothing, or diverged, and after how many steps.

    It has learnt nothing if the negative log-likelihood of its last steps is not below that of its first steps.
    """
    course = run.results.get("training", [])
    if "failure" in run.results:
        return f"diverged after step {course[-1]['step'] if course else 0}"
    nll = [row["nll"] for row in course if "nll" in row]
    return "learnt nothing" if len(nll) > 1 and nll[-1] >= nll[0] else "trained"


def largest_rise(course: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the largest rise of the negative log-likelihood above its least value so far; 0 if it only fell.

    The rows are those of `curve.read_training`; without any, return None.
    """
    nll = [row["nll"] for row in course if "nll" in row]
    least = itertools.accumulate(nll, min)
    return max((value - before for value, before in zip(nll, least, strict=True)), default=None)


def _name_models(models: Iterable[Trained]) -> str:
    return " and ".join(one.model for one in models)


def _group_by_measures(
    settings: Mapping[str, Mapping[tuple[bool, float | None], Sequence[Record]]],
) -> dict[str, list[Record]]:
    """Return the trainings of all settings with both measures, with one of them, and with neither."""
    found: dict[str, list[Record]] = {"both": [], "one": [], "neither": []}
    for ways in settings.values():
        for (scaled, limit), runs in ways.items():
            found[("neither", "one", "both")[scaled + (limit is not None)]] += runs
    return {f"with {measures}": runs for measures, runs in found.items() if runs}


def _count_outcomes(runs: Sequence[Record]) -> Mapping[str, int]:
    return Counter(map(describe_outcome, runs))


def _name(row: Mapping[str, Any]) -> str:
    """Return the name of a planned model, as that of a trained one."""
    return f"T({', '.join(map(str, shape_of(row)))}), {row['model_size']} wide"


def _deep_row(scaled: bool, limit: float | None, runs: Sequence[Record]) -> list[object]:
    """Return the row of one way to train a deep model."""
    ended = [run for run in runs if "failure" not in run.results]
    evaluations = [next(iter(run.results["evaluation"].values())) for run in ended]
    courses = [run.results.get("training", []) for run in runs]
    norms = [row["gradient_norm"] for course in courses for row in course if "gradient_norm" in row]
    clipped = [row.get("clipped") for course in courses for row in course]
    return [
        "yes" if scaled else "no",
        "none" if limit is None else f"{limit:g}",
        len(runs),
        spread([figures["loss"] for figures in evaluations], ".3f"),
        spread([run.results.get("least_loss", {}).get("loss") for run in ended], ".3f"),
        spread([course[0].get("nll") for course in courses if course], ".3f"),
        spread([course[-1].get("nll") for course in courses if course], ".3f"),
        spread([largest_rise(course) for course in courses], ".3f"),
        f"{max(norms):.3g}" if norms else "",
        "" if limit is None else spread([mean(clipped)], ".2%"),
        ", ".join(f"{text}: {count}" for text, count in _count_outcomes(runs).items()),
    ]


def _compare_losses(
    setting: str, ways: Mapping[tuple[bool, float | None], Sequence[Record]]
) -> tuple[str, Interval | None]:
    """Return a recipe, and the interval of the gain in final loss of both measures over neither, seed by seed."""
    losses = [
        {
            run.seed: next(iter(run.results["evaluation"].values()))["loss"]
            for run in runs
            if "failure" not in run.results
        }
        for (scaled, limit), runs in ways.items()
        if scaled == (limit is not None)
    ]
    recipe = setting[setting.index("learning rate") :]
    if len(losses) != 2:
        return f"final loss, {recipe}", None
    gains = {seed: {"": losses[1][seed] - losses[0][seed]} for seed in sorted(losses[0].keys() & losses[1].keys())}
    return f"final loss, {recipe}", over_seeds_and_parts(gains)


def average(one: Trained, name: str, languages: Iterable[str], corpus: Corpus) -> float | None:
    """Return the mean of a figure of a training over the languages that have it."""
    return mean(corpus.pool(_figures(one, name, languages)).values())


def _figures(one: Trained, name: str, languages: Iterable[str]) -> dict[str, float]:
    """Return a figure of a training on each of the languages that have it."""
    get = one.score if name in ("chrf", "bleu") else one.best
    found = {language: get(name, language) for language in languages}
    return {language: value for language, value in found.items() if value is not None}


def _interval(name: str, gains: Mapping[int, Mapping[str, float]]) -> Interval | None:
    """Return the interval of gains over seeds and languages; a lower loss is a gain."""
    sign = -1 if name == "loss" else 1
    return over_seeds_and_parts(
        {seed: {language: sign * gain for language, gain in found.items()} for seed, found in gains.items()}
    )


TABLES = (
    deep_or_wide,
    deep_or_wide_models,
    deep_training,
)
