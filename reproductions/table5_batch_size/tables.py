"""The tables of the paper's Table 5: what larger mini-batches gain."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from gpipe.records import Record
from reproductions import paper_scale
from reproductions.claims import NOT_RUN, Claim, format_verdicts
from reproductions.commands import Cell, commands_table
from reproductions.corpus import Corpus
from reproductions.design import Arm, design_table
from reproductions.paper_scale import Differences
from reproductions.table import Paper, markdown, newest, not_run, provenance
from reproductions.translation_runs import (
    SCORER,
    SCORING,
    Trained,
    beams,
    describe_search,
    mean,
    searches,
    spread,
    trainings,
)
from reproductions.verdict import over_seeds

PAPER_SCALE = "batch_size"
LAPTOP = "batch_size_laptop"
EXAMPLES = "batch_size_examples_laptop"
FIXED = {LAPTOP: "steps", EXAMPLES: "examples"}
"""What each experiment gives every mini-batch the same number of."""
_COMMAND = "train.py -m +experiment={}"


def table5(records: Sequence[Record], paper: Paper) -> str:
    """Return the paper's BLEU and negative log-likelihood beside ours, one row per mini-batch."""
    sizes = _by_size(_paper_scale_trainings(records, paper))
    rows = []
    for row in paper:
        runs = list(sizes.get(int(row["batch_tokens"]), {}).values())
        ours = [
            spread([average(records, one, "bleu") for one in runs], ".2f"),
            spread([one.last("loss") for one in runs], ".2f"),
        ]
        cells = [row["bleu"], ours[0] or "not run", row["nll"], ours[1] or "not run", len(runs)]
        rows.append([row["title"], *cells])
    return markdown(["tokens per mini-batch", "BLEU: paper", "ours", "NLL: paper", "ours", "runs"], rows)


def table5_other_settings(records: Sequence[Record], paper: Paper) -> str:
    """Return the runs with the paper-scale name but other settings."""
    return paper_scale.other_settings(records, [PAPER_SCALE], _held_against(paper))


def claims(records: Sequence[Record], paper: Paper) -> list[Claim]:
    """Return the gain of the largest mini-batch over the smallest, and the gains at laptop scale."""
    sizes = _by_size(_paper_scale_trainings(records, paper))
    ends = [sizes.get(int(row["batch_tokens"]), {}) for row in (paper[0], paper[-1])]
    scores = [spread([average(records, one, "bleu") for one in seeds.values()], ".2f") for seeds in ends]
    gained = [
        _minus(*(average(records, seeds[seed], "bleu") for seeds in reversed(ends)))
        for seed in sorted(ends[0].keys() & ends[1].keys())
    ]
    rows = [
        Claim(
            f"from {paper[0]['title']} to {paper[-1]['title']} tokens per mini-batch BLEU rises (Table 5)",
            f"{paper[0]['bleu']} to {paper[-1]['bleu']}",
            " to ".join(scores) if all(scores) else NOT_RUN,
            verdict=format_verdicts([("BLEU", over_seeds([gain for gain in gained if gain is not None]))], ".2f"),
        )
    ]
    for experiment, fixed in FIXED.items():
        for small in small_runs(records, experiment).values() or [{}]:
            found = [
                (f"{one:,} to {other:,}", over_seeds(_gains(experiment, small[one], small[other])))
                for one, other in itertools.pairwise(small)
            ]
            losses = [spread([_loss(experiment, one) for one in seeds.values()], ".2f") for seeds in small.values()]
            rows.append(
                Claim(
                    f"larger mini-batches lower the NLL with the {fixed} fixed, at laptop scale (Table 5)",
                    f"{paper[0]['nll']} to {paper[-1]['nll']}",
                    " to ".join(losses) or NOT_RUN,
                    verdict=format_verdicts(found, ".2f"),
                    scope=("intervals over seeds, not over validation lines" if small else "")
                    + _describe_rates(records, experiment, small),
                )
            )
    return rows


def table5_design(records: Sequence[Record], paper: Paper) -> str:
    """Return the question, budget, tuning and test items of each study of the page."""
    arms = []
    for experiment, fixed in FIXED.items():
        question = f"are larger mini-batches better with the {fixed} fixed?"
        for size, seeds in next(iter(small_runs(records, experiment).values()), {}).items():
            found = list(seeds.values())
            searched = [one.run for one in searches(records, experiment) if _size(one) == size]
            scores = [record for one in found for record in one.scored.values()]
            name, items = f"mini-batches of {size:,} tokens", _count_items(records, found)
            arms.append(Arm(question, name, experiment, [one.run for one in found], searched, scores, items))
        if not small_runs(records, experiment):
            arms.append(Arm(question, "each mini-batch", experiment, ()))
    counted = [one.run for one in _paper_scale_trainings(records, paper)]
    return design_table([*arms, Arm("are larger mini-batches better?", "the paper's model", PAPER_SCALE, counted)])


def table5_commands(records: Sequence[Record]) -> str:
    """Return the command of every training at laptop scale, and those that score its translations."""
    cells = [
        Cell(f"{_size(one):,} tokens, {fixed} fixed", one.run, one.scored)
        for experiment, fixed in FIXED.items()
        for sizes in small_runs(records, experiment).values()
        for one in _all(sizes)
    ]
    return commands_table(cells) if cells else not_run(_COMMAND.format(LAPTOP))


def table5_laptop(records: Sequence[Record]) -> str:
    """Return the table of the runs with the number of steps fixed, at the end of training."""
    return _laptop_table(records, LAPTOP)


def table5_examples(records: Sequence[Record]) -> str:
    """Return the table of the runs with the number of examples fixed, at the lowest loss."""
    return _laptop_table(records, EXAMPLES)


def _laptop_table(records: Sequence[Record], experiment: str) -> str:
    """Return a small model's figures by the mini-batch's tokens, and whether the next larger one is better.

    Means and deviations are over the seeds; gains are between runs of the same seed.
    """
    rows = []
    for setting, sizes in small_runs(records, experiment).items():
        smaller: dict[int, Trained] = {}
        for size, seeds in sizes.items():
            runs = list(seeds.values())
            steps = sorted({one.run.results["num_steps"] for one in runs})
            gains = _gains(experiment, smaller, seeds)
            interval = over_seeds(gains)
            rows.append(
                [
                    setting,
                    f"{size:,}",
                    ", ".join(sorted({str(one.run.config["pipeline"]["num_microbatches"]) for one in runs})),
                    ", ".join(f"{number:,}" for number in steps),
                    ", ".join(f"{number * size:,}" for number in steps),
                    len(runs),
                    spread([_loss(experiment, one) for one in runs], ".3f"),
                    spread(gains, ".3f", "+"),
                    *(spread([average(records, one, name) for one in runs], ".2f") for name in ("bleu", "chrf")),
                    "" if interval is None else interval.describe(".3f"),
                ]
            )
            smaller = seeds
    if not rows:
        return not_run(_COMMAND.format(experiment))
    header = ["model, data", "tokens per mini-batch", "M", "steps", "steps x tokens", "runs", "NLL, nats per token"]
    found = beams(one for sizes in small_runs(records, experiment).values() for one in _all(sizes))
    scores = (", ".join([name, *map(describe_search, found[:1])]) for name in ("BLEU", "chrF"))
    table = markdown([*header, "gain over the row above", *scores, "larger is better, NLL"], rows)
    return table if found else f"{table}\nBLEU and chrF: {not_run(SCORER).lower()}"


def table5_run(records: Sequence[Record]) -> str:
    """Return the provenance of the newest small model."""
    return provenance(newest(one.run for one in trainings(records, LAPTOP)), _COMMAND.format(LAPTOP))


def small_runs(records: Sequence[Record], experiment: str = LAPTOP) -> dict[str, dict[int, dict[int, Trained]]]:
    """Return the small trainings by setting, tokens of a mini-batch, and seed, the smallest mini-batch first."""
    settings: dict[str, list[Trained]] = {}
    for one in trainings(records, experiment):
        settings.setdefault(one.setting, []).append(one)
    return {setting: _by_size(found) for setting, found in settings.items()}


def average(records: Sequence[Record], one: Trained, name: str) -> float | None:
    """Return the mean of a score over the languages, with the narrowest beam."""
    scores = {language: one.score(name, language) for language in one.pairs()}
    known = {language: score for language, score in scores.items() if score is not None}
    return mean(Corpus(records, one.setting).pool(known).values())


def _by_size(found: Iterable[Trained]) -> dict[int, dict[int, Trained]]:
    sizes: dict[int, dict[int, Trained]] = {}
    for one in found:
        sizes.setdefault(_size(one), {})[one.run.seed] = one
    return {size: dict(sorted(seeds.items())) for size, seeds in sorted(sizes.items())}


def _held_against(paper: Paper) -> Differences:
    """Return what compares a run with the paper-scale one of the nearest mini-batch."""
    sizes = [int(row["batch_tokens"]) for row in paper]

    def differences(run: Record) -> list[str]:
        size = min(sizes, key=lambda size: abs(size - run.config["trainer"]["batch_size"]))
        words = [f"+experiment={PAPER_SCALE}", f"trainer.batch_size={size}"]
        replicas = run.config.get("launch", {}).get("num_replicas", 1)  # M depends on their number
        return paper_scale.differences(run, [*words, f"launch.num_replicas={replicas}"])

    return differences


def _paper_scale_trainings(records: Sequence[Record], paper: Paper) -> list[Trained]:
    counting = paper_scale.paper_scale(records, [PAPER_SCALE], _held_against(paper))
    return trainings([*counting, *(record for record in records if record.experiment == SCORING)], PAPER_SCALE)


def _loss(experiment: str, one: Trained) -> float | None:
    """Return the NLL that counts: after a fixed number of steps, or the least within a fixed number of examples."""
    return one.last("loss") if experiment == LAPTOP else one.best("loss")


def _gains(experiment: str, smaller: Mapping[int, Trained], larger: Mapping[int, Trained]) -> list[float]:
    """Return by how much the NLL of a larger mini-batch is lower, seed by seed."""
    seeds = [seed for seed in larger if seed in smaller]
    gains = [_minus(_loss(experiment, smaller[seed]), _loss(experiment, larger[seed])) for seed in seeds]
    return [gain for gain in gains if gain is not None]


def _describe_rates(records: Sequence[Record], experiment: str, sizes: Mapping[int, Mapping[int, Trained]]) -> str:
    """Say that all mini-batches have one learning rate that nothing chose, where it is so, and for how many steps."""
    found = _all(sizes)
    if len(sizes) < 2 or len({one.recipe.learning_rate for one in found}) > 1 or searches(records, experiment):
        return ""
    steps = [one.run.results["num_steps"] for one in found]
    extent = " to ".join(f"{number:,}" for number in sorted({min(steps), max(steps)}))
    return f"; one learning rate for all, not tuned, {extent} steps"


def _size(one: Trained) -> int:
    """Return the tokens of its mini-batch."""
    return int(one.run.config["trainer"]["batch_size"])


def _count_items(records: Sequence[Record], found: Sequence[Trained]) -> str:
    """Say what the NLL is measured on, and how many test sentences the scores are of."""
    corpus = Corpus(records, found[0].setting)
    counts = corpus.num_sentences
    valid, test = (corpus.describe_lines(split) for split in ("valid", "test"))
    scored = test or f"{sum(counts.values()):,} sentences"
    return f"NLL: {valid or 'the validation set'}" + (f"; scores: {scored}, {len(counts)} languages" if counts else "")


def _all(sizes: Mapping[int, Mapping[int, Trained]]) -> list[Trained]:
    return [one for seeds in sizes.values() for one in seeds.values()]


def _minus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


TABLES = (
    table5_design,
    table5,
    table5_other_settings,
    table5_laptop,
    table5_examples,
    table5_commands,
    table5_run,
)
