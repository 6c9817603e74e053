"""The design of each study, which a page shows before its verdicts: question, budget, tuning and test items.

Everything but the question is computed from the records, or from the settings if nothing was run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any

from gpipe.config import compose_plain
from gpipe.records import Record
from reproductions.claims import NOT_RUN
from reproductions.table import markdown

_TUNABLE = {
    "optimizer.learning_rate": "learning rate",
    "model.dropout": "dropout",
    "schedule.warm_up_steps": "steps of warm-up",
    "trainer.max_steps": "steps",
}
_ALWAYS_TOLD = ("learning rate", "dropout")
_MOST_ITEMS = 100_000


@dataclass(frozen=True)
class Arm:
    """A row of a study's design: the trainings of one experiment that the study puts together.

    Attributes:
        question: the question of the study.
        name: what was trained.
        experiment: the file in conf/experiment/ that trains it.
        runs: the trainings that the tables compare.
        searched: further trainings, which chose the settings of these.
        scores: the records of their translations' scores.
        test_items: what the verdicts are measured on.
    """

    question: str
    name: str
    experiment: str
    runs: Sequence[Record]
    searched: Sequence[Record] = ()
    scores: Sequence[Record] = ()
    test_items: str = ""


def design_table(arms: Iterable[Arm]) -> str:
    """Return a row per arm: its runs, budget, tuning, and test items."""
    header = ["question", "trained", "runs", "seeds", "steps", "tuned", "test items", "seconds spent"]
    return markdown(header, [_make_row(arm) for arm in arms])


def count_images(runs: Iterable[Record]) -> int:
    """Return the smallest number of test images for which every recorded accuracy is a whole number of right answers.

    Records have accuracies, not the number of images. A fraction of right answers in lowest terms divides it.
    """
    counts = [Fraction(value).limit_denominator(_MOST_ITEMS).denominator for run in runs for value in _list_top1(run)]
    return lcm(*counts)


def _list_top1(run: Record) -> Iterable[float]:
    """Yield each accuracy of the test set that a record has, of averages and of the weights themselves."""
    figures = run.results.get("evaluation", {}).get("test", {})
    yield from (figures[name] for name in ("top1", "raw_top1") if name in figures)
    yield from (row["test/top1"] for row in run.results.get("curve", []) if "test/top1" in row)


def _make_row(arm: Arm) -> list[str]:
    every = [*arm.runs, *arm.searched]
    seconds = sum(record.results.get("seconds", 0) for record in (*every, *arm.scores))
    return [
        arm.question,
        f"{arm.name} (`{arm.experiment}`)",
        str(len(arm.runs)) + (f", and {len(arm.searched)} for tuning" if arm.searched else ""),
        str(len({run.seed for run in arm.runs})) if arm.runs else NOT_RUN,
        _describe_steps(arm),
        _describe_tuning(arm),
        arm.test_items if arm.runs else "",
        f"{seconds:,.0f}" if every else NOT_RUN,
    ]


def _describe_steps(arm: Arm) -> str:
    """Describe how many steps the runs took and their limit, or how many they would take."""
    configs = [run.config for run in arm.runs] or [compose_plain([f"+experiment={arm.experiment}", "init_from=null"])]
    limits = _join(config["trainer"].get("max_steps") for config in configs)
    epochs = _join(config["trainer"]["num_epochs"] for config in configs)
    limit = f"at most {limits}" if limits else f"{epochs} epochs"
    taken = [run.results["num_steps"] for run in arm.runs if "num_steps" in run.results]
    if not taken:
        return f"{NOT_RUN} ({limit})"
    span = f"{min(taken):,}" if len({*taken}) == 1 else f"{min(taken):,} to {max(taken):,}"
    return f"{span} ({limit})"


def _describe_tuning(arm: Arm) -> str:
    """Describe the settings that a search varied, and those with separate rows, or say that nothing was tuned."""
    if not arm.runs:
        return "not tuned: nothing was run"
    own, every = _collect(arm.runs), _collect([*arm.runs, *arm.searched])
    if arm.searched:
        return "; ".join(f"{name}: {_join(values)}" for name, values in every.items() if len(values) > 1)
    varied = [f"{name} {_join(values)}" for name, values in own.items() if len(values) > 1]
    fixed = [f"{name} {_join(own[name])}" for name in _ALWAYS_TOLD if len(own.get(name, ())) == 1]
    alike = f"not tuned: {', '.join(fixed)}" if fixed else "not tuned"
    return f"{alike}; a row for each {', '.join(varied)}" if varied else alike


def _collect(runs: Iterable[Record]) -> dict[str, set[Any]]:
    """Return the values of each setting that a search may vary, by its name."""
    found: dict[str, set[Any]] = {}
    for run in runs:
        for key, name in _TUNABLE.items():
            section, _, setting = key.partition(".")
            value = run.config.get(section, {}).get(setting)
            if value is not None:
                found.setdefault(name, set()).add(value)
    return found


def _join(values: Iterable[float | None]) -> str:
    return ", ".join(
        f"{value:,}" if isinstance(value, int) else f"{value:g}"
        for value in sorted({value for value in values if value is not None})
    )
