"""The tables of section 5 of the paper and its figure 3: one model of all languages beside one model per language."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from gpipe.records import Record
from reproductions import paper_scale
from reproductions.claims import NOT_RUN, Claim, format_gains, format_verdicts
from reproductions.commands import Cell, commands_table
from reproductions.corpus import MIN_TEST_SENTENCES, Corpus
from reproductions.design import Arm, design_table
from reproductions.english_lines import english_lines
from reproductions.figure3_multilingual import depth
from reproductions.figure3_multilingual.gain import Line, split_by_pairs
from reproductions.figure3_multilingual.pairs import (
    BILINGUAL,
    EVERY,
    LOSS,
    SCORES,
    TESTED,
    Figure,
    Means,
    find_gain,
    find_means,
    fit_gains,
    group_pairs,
    list_figures,
    list_judged_figures,
    list_languages,
    list_multilingual,
    multilingual_trainings,
    pair_models,
)
from reproductions.figure3_multilingual.text_scale import TEXT_SCALE
from reproductions.table import Paper, format_value, markdown, newest, not_run, provenance, rounds_to
from reproductions.translation_runs import (
    DEEP_OR_WIDE,
    PARAMETERS,
    SCORER,
    SCORING,
    Trained,
    compare_beams,
    compare_recipes,
    describe_search,
    is_tuned,
    mean,
    planned_models,
    searches,
    shape_of,
    spread,
    trainings,
)

PAPER_SCALE = ("transformer_multilingual", "deep_or_wide")
NUM_TABLES = {1: "1 table", 2: "2 tables", 3: "3 tables"}
"""Embedding-sized tables of source, target and softmax layer: all tied, the two inputs tied, none tied."""
_COMMANDS = "python -m experiments.multilingual"
ONE_LANGUAGE = "one language: over seeds alone"
_OVER = {EVERY: "all languages that have both models", TESTED: f"those with {TESTED}"}
_NAMES = ("6_8192_16", "12_16384_32", "24_8192_16", "32_16384_32", "64_16384_32")


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
    for setting, groups in group_pairs(records).items():
        figures, corpus = list_judged_figures(groups[EVERY].values()), Corpus(records, setting)
        forms = {figure.title: figure.form for figure in figures}
        for group, seeds in groups.items():
            languages = list_languages(seeds)
            number, extent = corpus.describe_number(languages, "language"), corpus.describe_pairs(languages)
            found = {figure.title: find_gain(seeds, figure, languages, corpus) for figure in figures}
            rows.append(
                Claim(
                    "one model of 102 languages beats one per language, at laptop scale (section 5)",
                    "better on nearly all languages",
                    f"gain on {number}{extent and f' with {extent}'}: {format_gains(found, forms)}",
                    verdict=format_verdicts(found.items(), forms),
                    scope=f"{depth.NOT_DRAWN}: {_OVER[group]}",
                )
            )
        lines = {title: line for title, (_, line) in fit_gains(records, setting).items() if line is not None}
        rows.append(
            Claim(
                "the multilingual model's gain falls with the number of training pairs, at laptop scale (figure 3)",
                "gains most on languages with few examples",
                "; ".join(f"{title}: changes sign at {_describe_sign(line)}" for title, line in lines.items())
                or NOT_RUN,
                verdict=format_verdicts(((title, line.loss_per_doubling) for title, line in lines.items()), forms),
                scope=depth.NOT_DRAWN,
            )
        )
    return [*rows, *depth.claims(records, paper)]


def figure3_low_resource(records: Sequence[Record]) -> str:
    """Compare one multilingual model with bilingual ones of its size, on the languages that have these.

    The first table is over all of these languages, the second over those with enough test sentences. There is one row
    per figure and seed, then one for all seeds. Each number is a mean over the languages, with each model at its least
    validation loss.
    """
    tables = []
    every = [(setting, *group) for setting, groups in group_pairs(records).items() for group in groups.items()]
    for setting, group, seeds in every:
        rows, corpus = [], Corpus(records, setting)
        for figure in list_figures(seeds.values()):
            means = {seed: found for seed in sorted(seeds) if (found := find_means(seeds[seed], figure, corpus))}
            rows += [
                [figure.title, str(seed), corpus.describe_number(found.languages), *_cells([found], figure), ""]
                for seed, found in means.items()
            ]
            rows.append([figure.title, f"all {len(means)}", "", *_cells(list(means.values()), figure)])
            interval = find_gain(seeds, figure, list_languages(seeds), corpus) if figure.is_judged else None
            rows[-1].append("" if interval is None else interval.describe(figure.form))
            if not means:
                rows[-1][-1] = f"not run: {SCORER}"
        header = [f"{setting}: {group}", "seed", "languages", "bilingual", "multilingual", "difference"]
        tables.append(markdown([*header, "multilingual is better on", "verdict"], rows))
    return "\n".join(tables) or not_run(_COMMANDS)


def figure3_left_out(records: Sequence[Record]) -> str:
    """Say which languages the second group leaves out because their test sets are small."""
    lines = []
    for setting, seeds in pair_models(records).items():
        corpus, every = Corpus(records, setting), list_languages(seeds)
        left_out, kept = sorted(every & corpus.barely_tested), every - corpus.barely_tested
        said = f"{len(left_out)} of {len(every)} languages have fewer than {MIN_TEST_SENTENCES} test sentences"
        names = f" and are left out of the second table: {', '.join(left_out)}" if left_out else ""
        parts = {f"the {len(left_out)}": left_out, f"the other {len(kept)}": kept}
        extents = [(part, corpus.describe_pairs(names)) for part, names in parts.items() if names]
        have = ", ".join(f"{part} have {extent}" for part, extent in extents if extent)
        lines.append(f"{setting}: {said}{names}.{f' {have[0].upper()}{have[1:]}.' if have else ''}\n")
    return "\n".join(lines) or not_run(_COMMANDS)


def figure3_limits(records: Sequence[Record]) -> str:
    """Count the trainings whose lowest loss is that of the last step of their limit: more steps may be better."""
    rows = []
    for groups in group_pairs(records).values():
        for group, seeds in groups.items():
            pairs = [pair for languages in seeds.values() for pair in languages.values()]
            of_all = {id(other): other for _, other in pairs}.values()  # each once
            kinds = {"bilingual": [one for one, _ in pairs], "multilingual": list(of_all)}
            for kind, found in kinds.items():
                for limit in sorted({one.recipe.max_steps for one in found if one.recipe.max_steps is not None}):
                    alike = [one for one in found if one.recipe.max_steps == limit]
                    at_limit = sum(one.is_unfinished for one in alike)
                    rows.append([group, kind, f"{limit:,}", len(alike), at_limit])
    header = ["languages", "models", "limit of steps", "trainings", "with the lowest loss at the last step"]
    return markdown(header, rows) if rows else not_run(_COMMANDS)


def figure3_search(records: Sequence[Record]) -> str:
    """Return what the searches for the recipes of both kinds of models found, the best one first."""
    settings = {one.setting for one in trainings(records, BILINGUAL)}
    found = [("one per language", BILINGUAL, None), *(("one of all", DEEP_OR_WIDE, one) for one in sorted(settings))]
    rows = []
    for name, experiment, setting in found:
        compared = {one.recipe[:2] for one in trainings(records, experiment) if setting in (None, one.setting)}
        rows += [
            [name, f"{rate:g}", f"{dropout:g}", number, f"{loss:.4f}", "yes" if (rate, dropout) in compared else ""]
            for (rate, dropout), (number, loss) in compare_recipes(records, experiment, setting).items()
        ]
    header = ["models", "learning rate", "dropout", "number", "mean of the lowest validation losses"]
    return markdown([*header, "compared below"], rows) if rows else not_run(_COMMANDS)


def figure3_beams(records: Sequence[Record]) -> str:
    """Return the chrF of the validation sets by beam, for both kinds of models; the best is that of the test sets."""
    rows = []
    for name, is_of_all in (("one per language", False), ("one of all", True)):
        found = compare_beams(records, is_of_all=is_of_all)
        best = max((chrf for _, chrf in found.values()), default=None)
        rows += [
            [name, describe_search(beam), str(number), f"{chrf:.2f}", "yes" if chrf == best else ""]
            for beam, (number, chrf) in found.items()
        ]
    header = ["models", "search", "languages", "mean chrF of the validation sets", "on the test sets"]
    return markdown(header, rows) if rows else not_run(_COMMANDS)


def figure3_gain(records: Sequence[Record]) -> str:
    """Return the multilingual model's gain by the number of training pairs, and the line through all languages.

    A gain is positive where the multilingual model is better. Scores are those of the narrowest beam. The line is of
    least squares over the logarithm of the number of pairs.
    """
    tables = []
    for setting, seeds in pair_models(records).items():
        corpus = Corpus(records, setting)
        if not corpus.pairs:
            continue
        rows = []
        for figure in list_judged_figures(seeds.values()):
            for name, group in split_by_pairs(
                corpus.pairs, sorted(list_languages(seeds) & corpus.pairs.keys())
            ).items():
                interval = find_gain(seeds, figure, group, corpus)
                tested = len(set(group) - corpus.barely_tested)
                mean_gain = "" if interval is None else f"{interval.mean:+{figure.form}}"
                alone = ONE_LANGUAGE if corpus.count(group) == 1 else None
                judged = f"not run: {SCORER}" if interval is None else interval.describe(figure.form, alone)
                rows.append([figure.title, name, corpus.describe_number(group), tested, mean_gain, judged])
        header = [setting, "training pairs", "languages", f"with {MIN_TEST_SENTENCES} test sentences or more"]
        tables.append(markdown([*header, "gain", "multilingual is better"], rows))
        lines = [
            [title, *_describe_line(line, figure.form)]
            for title, (figure, line) in fit_gains(records, setting).items()
            if line is not None
        ]
        header = [f"{setting}: the line", "gain at the fewest pairs", "gain at the most pairs", "changes sign at"]
        header += ["above zero up to", "below zero from", "falls with each doubling of the pairs"]
        tables.append(markdown(header, lines))
    return "\n".join(tables) or not_run(_COMMANDS)


def figure3_languages(records: Sequence[Record]) -> str:
    """Return the same language by language, means over the seeds, the languages with the fewest pairs first.

    Scores are those of the narrowest beam.
    """
    tables = []
    for setting, seeds in pair_models(records).items():
        corpus, rows = Corpus(records, setting), []
        figures = [LOSS, *(Figure(name, title, ".1f") for name, title in SCORES.items())]
        languages = {language for found in seeds.values() for language in found}
        for language in sorted(languages, key=lambda language: (corpus.pairs.get(language, 0), language)):
            both = [found[language] for found in seeds.values() if language in found]
            cells = [
                format_value(mean(figure.of(pair[place], language) for pair in both), figure.form)
                for figure in figures
                for place in (0, 1)
            ]
            counts = [format_value(of.get(language), ",") for of in (corpus.pairs, corpus.num_sentences)]
            rows.append([language, *counts, str(len(both)), *cells])
        header = [setting, "training pairs", "test sentences", "seeds"]
        header += [f"{name}: {one}" for name in ("loss", "chrF", "BLEU") for one in ("bilingual", "multilingual")]
        tables.append(markdown(header, rows))
    return "\n".join(tables) or not_run(_COMMANDS)


def figure3_run(records: Sequence[Record]) -> str:
    """Return the provenance of the newest small multilingual model."""
    return provenance(newest(one.run for one in list_multilingual(records)), _COMMANDS)


def figure3_commands(records: Sequence[Record]) -> str:
    """Return the command of every training on the page, and those that score its translations."""
    cells = [
        *(Cell(", ".join(one.languages or ()), one.run, one.scored) for one in trainings(records, BILINGUAL)),
        *(Cell(one.model, one.run, one.scored) for one in list_multilingual(records)),
        *(
            Cell(setting, run, {})
            for setting, ways in depth.deep_trainings(records).items()
            for runs in ways.values()
            for run in runs
        ),
    ]
    return commands_table(cells) if cells else not_run(_COMMANDS)


def figure3_design(records: Sequence[Record]) -> str:
    """Return the question, budget, tuning and test items of each study of the page."""
    arms = []
    question = "is one model of all languages better than one per language?"
    searched_alone = searches(records, BILINGUAL) if is_tuned(records, BILINGUAL) else []
    for setting, groups in group_pairs(records).items():
        models = [
            one for one in multilingual_trainings(records) if one.setting == setting and one.run.seed in groups[EVERY]
        ]
        alone = [one for one in trainings(records, BILINGUAL) if one.setting == setting]
        counts = [_count_items(Corpus(records, setting), list_languages(seeds)) for seeds in groups.values()]
        items = "; ".join(dict.fromkeys(counts))
        arms.append(_make_arm(question, "one model per language", BILINGUAL, alone, searched_alone, items))
        searched = searches(records, DEEP_OR_WIDE) if searched_alone else []
        arms.append(_make_arm(question, f"one {models[0].model}", DEEP_OR_WIDE, models, searched, items))
    question = "are deep models better than wide ones for languages with few examples?"
    for data, depths in depth.models_by_depth(records).items():
        corpus = Corpus(records, data[0])
        for found in (list(models.values()) for models in depths.values()):
            items = _count_items(corpus, corpus.tested_groups["low"])
            searched = searches(records, DEEP_OR_WIDE)
            arms.append(_make_arm(question, found[0].model, DEEP_OR_WIDE, found, searched, items))
    question = "do scaled initialisation and clipped logits let deep models train?"
    for ways in depth.deep_trainings(records).values():
        for (scaled, limit), runs in ways.items():
            name = f"{'scaled' if scaled else 'usual'} initialisation, logits {'not ' if limit is None else ''}clipped"
            lines = Corpus(records, runs[0].config["data"]["name"]).describe_lines("valid")
            items = f"loss of the validation set{lines and f': {lines}'}"
            arms.append(Arm(question, name, depth.DEEP_TRAINING, runs, test_items=items))
    counted = [one.run for one in _paper_scale_trainings(records)]
    return design_table([*arms, Arm("are larger models better?", "the paper's models", PAPER_SCALE[0], counted)])


def _make_arm(
    question: str, name: str, experiment: str, found: Sequence[Trained], searched: Sequence[Trained], items: str
) -> Arm:
    """Return what the design says of trainings, with the search for their recipe, and the scores of translations."""
    models = {one.model for one in found}
    search = [one.run for one in searched if one.model in models]
    scores = [record for one in found for record in one.scored.values()]
    return Arm(question, name, experiment, [one.run for one in found], search, scores, items)


def _count_items(corpus: Corpus, languages: Iterable[str]) -> str:
    """Describe the test items: the numbers of languages, of sentences and of English lines."""
    found = sorted(language for language in languages if language in corpus.num_sentences)
    if not found:
        return "loss of the validation set"
    test, valid = (corpus.describe_lines(split, found) for split in ("test", "valid"))
    number = corpus.describe_number(found, "language")
    if not test:
        return f"{sum(corpus.num_sentences[language] for language in found):,} sentences of {number}"
    return f"{number}: {test}; for the loss {valid}"


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


def _describe_line(line: Line, form: str) -> list[str]:
    """Write the gain at both ends, where its sign changes, and whether it falls."""
    low, high = line.num_pairs
    ends = [(pairs, line.at(pairs)) for pairs in (low, high)]
    return [
        *(f"{interval.mean:+{form}} at {pairs:,}: {interval.describe(form)}" for pairs, interval in ends),
        _describe_sign(line),
        "nowhere" if line.above_until is None else f"{line.above_until:,} pairs",
        "nowhere" if line.below_from is None else f"{line.below_from:,} pairs",
        line.loss_per_doubling.describe(form),
    ]


def _describe_sign(line: Line) -> str:
    """Write the number of pairs at which the gain changes sign, or that it does not among the languages."""
    low, high = line.num_pairs
    place = line.change_of_sign
    return f"none from {low:,} to {high:,} pairs" if place is None else f"{place:,.0f} pairs"


def _cells(means: Sequence[Means], figure: Figure) -> list[str]:
    """Write the means over one or several seeds."""
    both = [[found.bilingual for found in means], [found.multilingual for found in means]]
    cells = [spread(values, figure.form) for values in both]
    cells.append(spread([found.multilingual - found.bilingual for found in means], figure.form, "+"))
    better = f"{fmean(found.num_better for found in means):.3g}" if means and figure.is_judged else ""
    return [*cells, better]


TABLES = (
    figure3_design,
    figure3_models,
    figure3_other_settings,
    figure3_search,
    figure3_beams,
    figure3_left_out,
    english_lines,
    figure3_limits,
    figure3_low_resource,
    figure3_gain,
    figure3_languages,
    figure3_commands,
    figure3_run,
    *depth.TABLES,
    *TEXT_SCALE.tables,
)
