"""The tables of section 5 of the paper and its figure 3: one model of all languages, beside a model of each."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpipe.results.records import Record
from gpipe.results.tables import Paper, markdown, named, newest, not_run, provenance
from gpipe.results.translation_runs import (
    SCORER,
    Trained,
    mean,
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
                f"{plan['largest_stage_bytes'] / 2**30:.2f}",
                row["bleu"],
                bleu or "not run",
            ]
        )
    header = ["model", "parameters: paper", "ours, exact", "off the paper", "K", "GiB of weights", "fullest stage's"]
    return markdown([*header, "BLEU: paper, read off", "ours, measured"], rows)


def figure3_low_resource(records: Sequence[Record]) -> str:
    """Return how one multilingual model does beside bilingual ones of its size, on the languages that have these.

    A row a seed, then one of all seeds; each number is a mean over the languages, each model at its least validation
    loss.
    """
    rows = []
    for setting, seeds in compared(records).items():
        means = [_means(seeds[seed]) for seed in sorted(seeds)]
        rows += [
            [setting, str(seed), str(len(seeds[seed])), *_cells([found]), ""]
            for seed, found in zip(sorted(seeds), means, strict=True)
        ]
        gains = {name: [_gain(found, name) for found in means] for name in ("loss", "chrf", "bleu")}
        rows.append([setting, f"all {len(seeds)}", "", *_cells(means), _verdicts(gains)])
    if not rows:
        return not_run(_COMMANDS)
    header = ["model, data", "seed", "languages"]
    for name in ("loss, nats a token", "chrF", "BLEU"):
        header += [f"{name}: bilingual", "multilingual", "difference", "multilingual is better on"]
    return markdown([*header, "verdict"], rows)


def figure3_languages(records: Sequence[Record]) -> str:
    """Return the same language by language, means over the seeds, the languages with the fewest pairs first."""
    tables = []
    for setting, seeds in compared(records).items():
        pairs, rows = training_pairs(records, setting.rpartition(", ")[2]), []
        languages = {language for found in seeds.values() for language in found}
        for language in sorted(languages, key=lambda language: (pairs.get(language, 0), language)):
            both = [found[language] for found in seeds.values() if language in found]
            cells = [
                written(mean(pair[place][name] for pair in both), form)
                for name, form in (("loss", ".3f"), ("chrf", ".1f"), ("bleu", ".1f"))
                for place in (0, 1)
            ]
            rows.append([language, written(pairs.get(language), ","), str(len(both)), *cells])
        header = [setting, "training pairs", "seeds"]
        header += [f"{name}: {one}" for name in ("loss", "chrF", "BLEU") for one in ("bilingual", "multilingual")]
        tables.append(markdown(header, rows))
    return "\n".join(tables) or not_run(_COMMANDS)


def figure3_run(records: Sequence[Record]) -> str:
    """Return where the newest of the small multilingual models was trained, and on what."""
    runs = [one.run for one in trainings(records, MULTILINGUAL)]
    return provenance(max(runs, key=lambda run: run.date, default=None), _COMMANDS)


Figures = Mapping[str, float | None]
"""loss, chrf and bleu of a model on a language."""


def compared(records: Sequence[Record]) -> dict[str, dict[int, dict[str, tuple[Figures, Figures]]]]:
    """Return the bilingual and the multilingual model's figures by setting, seed and language.

    Only languages that both have with the same seed are in it.
    """
    multilingual = {(one.setting, one.run.seed): one for one in trainings(records, MULTILINGUAL)}
    found: dict[str, dict[int, dict[str, tuple[Figures, Figures]]]] = {}
    for one in trainings(records, BILINGUAL):
        other = multilingual.get((one.setting, one.run.seed))
        if other is None or one.languages is None or len(one.languages) != 1:
            continue
        language = one.languages[0]
        both = figures_of(one, language), figures_of(other, language)
        if None not in (both[0]["loss"], both[1]["loss"]):
            found.setdefault(one.setting, {}).setdefault(one.run.seed, {})[language] = both
    return found


def figures_of(trained: Trained, language: str) -> Figures:
    """Return a model's figures on a language."""
    scores = {name: trained.score(name, language) for name in ("chrf", "bleu")}
    return {"loss": trained.best("loss", language), **scores}


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


def _means(languages: Mapping[str, tuple[Figures, Figures]]) -> dict[str, tuple[float, float, int, int] | None]:
    """Return of each figure the two models' means over the languages, on how many the second is better, and of all.

    A figure that a language lacks with one of the two is left out of both means.
    """
    result: dict[str, tuple[float, float, int, int] | None] = {}
    for name in ("loss", "chrf", "bleu"):
        found = [(one[name], two[name]) for one, two in languages.values()]
        pairs = [(one, two) for one, two in found if one is not None and two is not None]
        if not pairs:
            result[name] = None
            continue
        better = sum(two < one if name == "loss" else two > one for one, two in pairs)
        total = len(pairs)
        result[name] = sum(one for one, _ in pairs) / total, sum(two for _, two in pairs) / total, better, total
    return result


def _cells(means: Sequence[Mapping[str, tuple[float, float, int, int] | None]]) -> list[str]:
    """Write the means of one or several seeds."""
    cells = []
    for name, form in (("loss", ".3f"), ("chrf", ".2f"), ("bleu", ".2f")):
        found = [values for one in means if (values := one[name]) is not None]
        cells += [spread([one for one, *_ in found], form), spread([two for _, two, *_ in found], form)]
        cells.append(spread([two - one for one, two, *_ in found], form, "+"))
        cells.append(" / ".join(f"{better} of {total}" for *_, better, total in found))
    return cells


def _gain(means: Mapping[str, tuple[float, float, int, int] | None], name: str) -> float | None:
    values = means[name]
    if values is None:
        return None
    return values[0] - values[1] if name == "loss" else values[1] - values[0]


def _verdicts(gains: Mapping[str, Sequence[float | None]]) -> str:
    """Say of each score whether the multilingual model is better with every seed."""
    titles = {"loss": "loss", "chrf": "chrF", "bleu": "BLEU"}
    return "; ".join(f"{titles[name]}: {verdict(of) or f'not run: {SCORER}'}" for name, of in gains.items())


BESIDE_PAPER = named(figure3_models)
TABLES = named(figure3_low_resource, figure3_languages, figure3_run)
