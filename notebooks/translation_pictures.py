"""The pictures of the fourth notebook: languages, depth and mini-batches."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt
from house_style import PAPER_ALONE, Color, show

from gpipe.records import Record, read_records
from reproductions import RUNS_FILE
from reproductions.corpus import Corpus
from reproductions.figure3_multilingual.depth import average
from reproductions.figure3_multilingual.gain import Line
from reproductions.figure3_multilingual.pairs import (
    LOSS,
    fit_gains,
    gains_of,
    group_pairs,
    list_gains,
    list_languages,
)
from reproductions.pages import read_paper
from reproductions.table import Paper, as_number
from reproductions.table5_batch_size.tables import small_runs
from reproductions.translation_runs import Trained, spread

FIGURE3, TABLE5 = (Path("../reproductions") / name for name in ("figure3_multilingual", "table5_batch_size"))
records, paper = read_records(FIGURE3 / RUNS_FILE), read_paper(FIGURE3)


def average_by_language(runs: Iterable[Trained], figure: str) -> dict[str, float]:
    """Return each language's loss or score, the mean over the runs."""
    values: dict[str, list[float]] = {}
    for one in runs:
        for language in one.languages or one.list_evaluated():
            value = one.best("loss", language) if figure == "loss" else one.score(figure, language)
            if value is not None:
                values.setdefault(language, []).append(value)
    return {language: fmean(of) for language, of in values.items()}


def draw_languages(
    axis: plt.Axes, many: Mapping[str, float], one: Mapping[str, float], pairs: Mapping[str, int]
) -> None:
    """Draw a figure against the number of training pairs: a line joins the two models of a language."""
    for language in sorted(one.keys() & many.keys() & pairs.keys()):
        axis.plot([pairs[language]] * 2, [one[language], many[language]], color="lightgray", linewidth=1, zorder=0)
    for values, label, color, marker in (
        (many, "multilingual", Color.MULTILINGUAL, "o"),
        (one, "bilingual", Color.BILINGUAL, "D"),
    ):
        places = sorted((pairs[language], value) for language, value in values.items() if language in pairs)
        if places:
            axis.plot(*zip(*places, strict=True), marker, color=color, markersize=4, markeredgewidth=0, label=label)
    axis.set_xscale("log")
    axis.set_xlabel("training pairs of the language")


def describe_not_run(what: str, command: str) -> str:
    """Say what was not run, and which command runs it."""
    return f"{what}: not run. The command is `{command}`."


SCORES_COMMAND = "python bleu.py <the run's folder>"


def draw_setting(setting: str, many: Sequence[Trained], one: Sequence[Trained]) -> None:
    """Draw the loss and chrF of each language, of a model and data."""
    pairs = Corpus(records, setting).pairs
    if not pairs:
        show(describe_not_run(f"{setting}: scores, and with them the number of pairs", SCORES_COMMAND))
        return
    _, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, figure, label in zip(
        axes, ("loss", "chrf"), ("lowest loss, nats per token", "chrF of the test set"), strict=True
    ):
        draw_languages(axis, average_by_language(many, figure), average_by_language(one, figure), pairs)
        axis.set_ylabel(label)
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend()
    axes[0].set_title(setting, loc="left", fontsize=10)
    plt.show()


def draw_gain(setting: str) -> None:
    """Draw the gain of each language against its number of training pairs, the line through them, and its interval."""
    corpus = Corpus(records, setting)
    fitted = {title: line for title, (_, line) in fit_gains(records, setting).items() if line is not None}
    if not fitted:
        show(describe_not_run(f"{setting}: scores, and with them the number of pairs", SCORES_COMMAND))
        return
    _, axes = plt.subplots(1, len(fitted), figsize=(3.2 * len(fitted), 3.4), layout="constrained", squeeze=False)
    for axis, (title, line) in zip(axes[0], fitted.items(), strict=True):
        values: dict[str, list[float]] = {}
        for by_language in list_gains(records, setting, title).values():
            for language, gain in by_language.items():
                values.setdefault(language, []).append(gain)
        for label, is_tested in (("50 test sentences or more", True), ("fewer", False)):
            points = [
                (corpus.pairs[language], fmean(of))
                for language, of in values.items()
                if language in corpus.pairs and (language not in corpus.barely_tested) == is_tested
            ]
            if points:
                style = {"markeredgewidth": 0} if is_tested else {"fillstyle": "none"}
                axis.plot(*zip(*points, strict=True), "o", color=Color.MULTILINGUAL, markersize=4, label=label, **style)
        draw_line(axis, line)
        axis.set_title(title, loc="left", fontsize=10)
        low, high = line.num_pairs
        label_sizes(axis, [size for size in (50, 100, 200, 500, 1_000, 10_000) if low <= size <= high])
        axis.set_xlabel("training pairs of the language")
    axes[0][0].set_ylabel("gain: above 0, multilingual is better")
    axes[0][-1].legend(fontsize=8)
    plt.show()


def draw_line(axis: plt.Axes, line: Line) -> None:
    """Draw a line with its interval, and mark where it crosses zero."""
    low, high = line.num_pairs
    places = [low * (high / low) ** (step / 40) for step in range(41)]
    found = [line.at(place) for place in places]
    axis.axhline(0, color="gray", linewidth=1)
    axis.plot(places, [interval.mean for interval in found], color=Color.MULTILINGUAL, linewidth=1.5)
    if len(line.fit.of_seeds) > 1:
        lows, highs = [interval.low for interval in found], [interval.high for interval in found]
        axis.fill_between(places, lows, highs, color=Color.MULTILINGUAL, alpha=0.2, linewidth=0)
    if line.change_of_sign is not None:
        axis.axvline(line.change_of_sign, color="gray", linewidth=1, linestyle=":")
        axis.text(
            line.change_of_sign, 0.93, f"{line.change_of_sign:,.0f} ", transform=axis.get_xaxis_transform(), ha="right"
        )


def describe_gain(setting: str) -> str:
    """Say on how many languages the multilingual model has the lower loss, and by how much, for each group of them."""
    said, corpus = [], Corpus(records, setting)
    for group, seeds in group_pairs(records)[setting].items():
        languages, values = sorted(list_languages(seeds)), dict[str, list[float]]()
        for found in gains_of(seeds, LOSS, languages).values():
            for language, gain in corpus.pool(found).items():
                values.setdefault(language, []).append(gain)
        number, extent = corpus.describe_number(languages, "language"), corpus.describe_pairs(languages)
        gains = [fmean(of) for of in values.values()]
        better, mean_gain = sum(gain > 0 for gain in gains), fmean(gains)
        said.append(
            f"**{setting}, {group}**, {number}{extent and f' with {extent}'}: on {better} of {len(gains)} the "
            f"multilingual model has the lower loss, means over {len(seeds)} seeds. In the mean over all {len(gains)} "
            f"its loss is {'lower' if mean_gain > 0 else 'higher'} by {abs(mean_gain):.3f} nats."
        )
    return "\n\n".join(said)


def name_choice(scaled: bool, limit: float | None) -> str:
    """Name a choice of initialisation and clipping."""
    first = "scaled initialisation" if scaled else "usual initialisation"
    return f"{first}, {'no clipping' if limit is None else f'logits clipped at {limit:g}'}"


def draw_course(axis: plt.Axes, run: Record, key: str, color: str, label: str | None, *, is_wide: bool) -> None:
    """Draw a figure of a training over its steps; a wide line can be seen under a thin one."""
    course = [row for row in run.results.get("training", []) if key in row]
    steps, values = [row["step"] for row in course], [row[key] for row in course]
    axis.plot(steps, values, color=color, linewidth=5 if is_wide else 1.2, alpha=0.5 if is_wide else 1, label=label)
    if "failure" in run.results and course:
        axis.plot(steps[-1], values[-1], "x", color=color, markersize=9, markeredgewidth=2)


def label_sizes(axis: plt.Axes, sizes: Iterable[int]) -> None:
    """Mark the mini-batches on an axis of orders of magnitude."""
    axis.set_xscale("log")
    axis.set_xticks(list(sizes), [f"{size:,}" for size in sizes])
    axis.minorticks_off()


def draw_papers_models() -> None:
    """Draw BLEU of the paper's models against their parameters."""
    _, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
    for row in paper:
        size, bleu = as_number(row["parameters"]), float(row["bleu_read_off_by_third_party"])
        name = f"T({row['num_layers']}, {row['feedforward_size']}, {row['num_heads']})"
        axis.plot(size, bleu, "D", color="dimgray", markersize=8, fillstyle="none")
        axis.annotate(f"{name}: {bleu}", (size, bleu), (9, -3), textcoords="offset points", color="dimgray")
    axis.set_xscale("log")
    axis.set_xlim(3e8, 2e10)
    axis.set_xlabel("parameters")
    axis.set_ylabel("average BLEU, a third party's reading")
    axis.set_title(PAPER_ALONE)
    plt.show()


GROUPS = (("low", 0.97, Color.LOW_RESOURCE, "o"), ("high", 1.03, Color.HIGH_RESOURCE, "D"))


def draw_depths(data: str, depths: Mapping[int, Mapping[int, Trained]], groups: Mapping[str, list]) -> None:
    """Draw loss and scores against the number of layers, by group of languages of a data set."""
    corpus = Corpus(records, data)
    _, axes = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
    labels = {"loss": "lowest loss, nats per token", "chrf": "chrF of the test set", "bleu": "BLEU of the test set"}
    for axis, (figure, label) in zip(axes, labels.items(), strict=True):
        for group, side, color, marker in GROUPS:
            means = []
            for depth, models in depths.items():
                found = [average(one, figure, groups[group], corpus) for one in models.values()]
                seen = [value for value in found if value is not None]
                if seen:
                    axis.plot([depth * side] * len(seen), seen, marker, color=color, ms=4, mew=0, alpha=0.5)
                    means.append((depth * side, fmean(seen)))
            axis.plot(*zip(*means, strict=True), color=color, linewidth=1.5, label=f"{group} resource")
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(depths), [str(depth) for depth in depths])
        axis.set_xlabel("layers, encoder and decoder each")
        axis.set_ylabel(label)
    axes[0].legend(fontsize=8)
    plt.show()


WAYS = {
    (True, True): Color.SCALED_AND_CLIPPED,
    (True, False): Color.SCALED,
    (False, True): Color.CLIPPED,
    (False, False): Color.NEITHER,
}


def draw_deep_training(setting: str, ways: Mapping[tuple[bool, float | None], Sequence[Record]]) -> None:
    """Draw loss and gradient norm of very deep trainings, by initialisation and clipping."""
    _, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for (scaled, limit), runs in ways.items():
        for place, run in enumerate(runs):
            color, label = WAYS[scaled, limit is not None], None if place else name_choice(scaled, limit)
            draw_course(axes[0], run, "nll", color, label, is_wide=limit is not None)
            draw_course(axes[1], run, "gradient_norm", color, None, is_wide=limit is not None)
    axes[0].legend(fontsize=8)
    axes[0].set_title(setting, loc="left", fontsize=10)
    axes[0].set_ylabel("training loss, nats per token")
    axes[1].set_ylabel("largest gradient norm")
    axes[1].set_yscale("log")
    for axis in axes:
        axis.set_xlabel("step")
    plt.show()


SETTINGS = (Color.SETTING_1, Color.SETTING_2, Color.SETTING_3)


def draw_batch_sizes(batch_records: Sequence[Record], batch_paper: Paper) -> None:
    """Draw the loss against the size of the mini-batch: the paper's, and ours."""
    _, (theirs, ours) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    sizes, losses = zip(*((int(row["batch_tokens"]), float(row["nll"])) for row in batch_paper), strict=True)
    theirs.plot(sizes, losses, "D", color="dimgray", markersize=8, fillstyle="none")
    theirs.set_title(PAPER_ALONE, loc="left", fontsize=10)
    for color, (setting, by_size) in zip(SETTINGS, small_runs(batch_records).items(), strict=False):
        values = {size: [one.last("loss") or 0.0 for one in seeds.values()] for size, seeds in by_size.items()}
        for size, of in values.items():
            ours.plot([size] * len(of), of, "o", color=color, markersize=5, markeredgewidth=0, alpha=0.6)
            text = f"  {spread(of, '.3f')}"
            ours.text(size, fmean(of), text, color=color, va="center")
        ours.plot(list(values), [fmean(of) for of in values.values()], color=color, linewidth=1)
        ours.set_title(setting, loc="left", fontsize=10, color=color)
        ours.margins(x=0.3)
        label_sizes(ours, values)
    label_sizes(theirs, sizes)
    if not small_runs(batch_records):
        ours.text(0.5, 0.5, "not run", transform=ours.transAxes, ha="center", color="dimgray", style="italic")
    for axis in (theirs, ours):
        axis.set_xlabel("tokens per mini-batch")
        axis.set_ylabel("NLL, nats per token")
    plt.show()
