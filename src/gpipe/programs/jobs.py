"""The jobs of a sweep: the outcome of each, and the table of all."""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from io import StringIO
from pathlib import Path
from shutil import get_terminal_size
from statistics import mean, stdev
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from gpipe.durable_files import write_flushed
from gpipe.records import RECORD_FILE, Record, read_records, without

OUTCOME_FILE = "outcome.json"
SUMMARY_FILE = "summary.md"
_WIDTH = 10_000  # characters; no cell is broken on a pipe or in the file, however long a reason is


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Attributes:
        status: "done", "failed" or "not run".
        overrides: The job's overrides.
        data: The name of the data set.
        reason: Why the job is not done.
        config: All settings of a job that failed in training, or for which this machine has too few devices; None if
            the data are missing.
    """

    status: Literal["done", "failed", "not run"]
    overrides: list[str]
    data: str
    reason: str | None = None
    config: dict[str, Any] | None = None


# The columns of the table: a result's name, its title, and its format.
_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "top1": ("top-1", "{:.2%}".format),
    "top5": ("top-5", "{:.2%}".format),
    "loss": ("loss", "{:.4f}".format),
    "examples_per_second": ("examples/s", "{:.4g}".format),
    "step_seconds": ("s per step, data apart", "{:.3g}".format),
    "bubble": ("bubble", "{:.1%}".format),
    "equal_stages_bubble": ("bubble, equal stages", "{:.1%}".format),
    "peak_memory_bytes": ("MiB, peak", lambda value: f"{value / 2**20:.0f}"),
    "seconds": ("minutes", lambda value: f"{value / 60:.1f}"),
}
_OF_EVALUATIONS = ("top1", "top5", "loss")


@dataclass(frozen=True)
class SweepJob:
    """The outcome and the folder of a job, its record if it is done, and when its outcome was written."""

    outcome: Outcome
    folder: Path
    record: Record | None
    written: float

    @cached_property
    def settings(self) -> dict[str, str]:
        """Its overrides by key; experiment=a of a grid replaces +experiment=b of the command line."""
        words = sorted(self.outcome.overrides, key=lambda override: not override.startswith("+"))
        return dict(map(_split_override, words))

    @cached_property
    def figures(self) -> dict[str, float]:
        """What its record has of the table's figures."""
        if self.record is None:
            return {}
        results = self.record.results
        main: dict[str, float] = next(iter(results.get("evaluation", {}).values()), {})
        found = results | {"loss": main.get("loss"), "examples_per_second": self.record.examples_per_second}
        return {name: found[name] for name in _FIGURES if found.get(name) is not None}


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Write an outcome into its job's folder, replacing the one of an earlier attempt."""
    write_flushed(folder / OUTCOME_FILE, json.dumps(asdict(outcome), indent=2) + "\n")


def read_jobs(folder: Path) -> list[SweepJob]:
    """Read the ended jobs in a sweep's folder, ordered by their settings.

    Raises:
        ValueError: the file of an outcome or a record is damaged.
    """
    jobs = []
    for path in folder.glob(f"*/{OUTCOME_FILE}"):
        outcome = _read_outcome(path)
        record = path.with_name(RECORD_FILE)
        is_recorded = outcome.status == "done" and record.exists()
        found = read_job_record(record) if is_recorded else None
        jobs.append(SweepJob(outcome, path.parent, found, path.stat().st_mtime))
    return sorted(jobs, key=lambda job: [_order(override) for override in job.outcome.overrides])


def read_job_record(path: Path) -> Record:
    """Read the record of a job; refuse a damaged one."""
    try:
        (record,) = read_records(path)
    except ValueError as error:
        what = str(error.__cause__ or error).rstrip(".")
        raise ValueError(f"{path} is not the record of a job ({what}): delete it, and start the sweep again.") from None
    return record


@cache
def _adapter() -> TypeAdapter[Outcome]:
    return TypeAdapter(Outcome)


def _read_outcome(path: Path) -> Outcome:
    try:
        return _adapter().validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        what = error.errors(include_url=False)[0]
        place = ".".join(map(str, what["loc"])) or "the file"
        raise ValueError(
            f"{path} is not the outcome of a job ({place}: {what['msg']}): delete it, and start the sweep again."
        ) from None


def summarize(folder: Path, jobs: Sequence[SweepJob], others: Sequence[SweepJob] = ()) -> None:
    """Write the table of a sweep into the sweep's folder, and print it; a narrow terminal shows fewer figures.

    `others` are jobs in its folder that are not its own; only their names are shown.
    """
    shown = [name for name in _FIGURES if any(name in job.figures for job in jobs)]
    means = "".join(f"\n{line}\n" for line in _average_seeds(jobs))
    if others:
        names = ", ".join(sorted(job.folder.name for job in others))
        means += f"\nleft out, because this sweep did not run them: {names}\n"
    table = _render_table(jobs, shown)
    path = folder / SUMMARY_FILE
    write_flushed(path, table + means)
    if sys.stdout.isatty():
        columns = get_terminal_size().columns
        while shown and len(table.partition("\n")[0]) > columns:
            table = _render_table(jobs, shown := shown[:-1])
    print(f"\n{table}{means}")
    found = Counter(job.outcome.status for job in jobs)
    counts = [f"{found[status]} {status}" for status in ("done", "not run", "failed") if found[status]]
    print(f"{', '.join(counts) or '0 done'}; the table is in {path}", flush=True)


def describe_best(jobs: Sequence[SweepJob]) -> str:
    """Return a line on the job of a search with the largest top-1; empty if none has one."""
    known = [job for job in jobs if "top1" in job.figures]
    if not known:
        return ""
    best = max(known, key=lambda job: job.figures["top1"])
    words = " ".join(best.outcome.overrides)
    return f"the best trial is {best.folder.name}, with top-1 {best.figures['top1']:.2%}: {words}"


def _average_seeds(jobs: Sequence[SweepJob]) -> list[str]:
    """Return a line per group of jobs that differ only in their seeds: mean and standard deviation of each figure."""
    groups: dict[tuple[str, str], list[SweepJob]] = {}
    for job in jobs:
        if job.record is not None:
            words = job.settings
            others = (f"{key}={value}" for key, value in words.items() if key != "seed")
            # Overrides do not show what is in files, so settings are compared too: without those that depend on the
            # seed, and without the memory limit, which depends on the host.
            of_seed = (key for key, value in words.items() if "${seed}" in f"{value}")
            found = without(("seed", "pipeline.memory_limit_bytes", *of_seed), job.record.settings)
            settings = json.dumps(found, sort_keys=True)
            groups.setdefault((" ".join(sorted(others)), settings), []).append(job)
    shared = set.intersection(*(set(name.split()) for name, _ in groups)) if len(groups) > 1 else set()
    lines = []
    for (name, _), group in groups.items():
        parts = []
        for figure in _OF_EVALUATIONS:
            title, show = _FIGURES[figure]
            values = [job.figures[figure] for job in group if figure in job.figures]
            if len(values) > 1:
                parts.append(f"{title} {show(mean(values))} ± {show(stdev(values))}")
        if parts:
            own = " ".join(word for word in name.split() if word not in shared) if len(groups) > 1 else ""
            lines.append(f"{own}{': ' if own else ''}{', '.join(parts)} (mean and deviation over {len(group)} seeds)")
    return lines


def _render_table(jobs: Sequence[SweepJob], shown: Sequence[str]) -> str:
    """Return a table with one row per job: the overrides in which the jobs differ, some figures, and the outcome.

    Jobs that were not run for the same reason on the same data share a row.
    """
    known = dict.fromkeys(key for job in jobs for key in job.settings)
    keys = [key for key in known if len({job.settings.get(key) for job in jobs}) > 1]
    table = Table(box=MARKDOWN)
    for key in keys:
        table.add_column(key)
    for name in shown:
        table.add_column(_FIGURES[name][0], justify="right")
    table.add_column("outcome")
    table.add_column("folder")
    groups: dict[object, list[SweepJob]] = {}
    for job in jobs:
        is_run = job.outcome.status != "not run"
        groups.setdefault(job.folder if is_run else (job.outcome.data, job.outcome.reason), []).append(job)
    for group in groups.values():
        first, outcome = group[0], group[0].outcome
        shared = [
            values.pop() if len(values := {job.settings.get(key, "") for job in group}) == 1 else "" for key in keys
        ]
        figures = [_FIGURES[name][1](first.figures[name]) if name in first.figures else "" for name in shown]
        why = f": {outcome.reason.splitlines()[0]}" if outcome.reason else ""
        count, folder = (f" ({len(group)} runs)", "") if len(group) > 1 else ("", first.folder.name)
        table.add_row(*shared, *figures, f"{outcome.status}{why}{count}", folder)
    text = StringIO()  # not a terminal, so without colours
    Console(file=text, width=_WIDTH, highlight=False, markup=False).print(table)  # [sw] is a language, not markup
    return "".join(line.rstrip() + "\n" for line in text.getvalue().splitlines() if line.strip())


def _order(override: str) -> tuple[str, float, str]:
    """Return the sorting key of an override: its key, then its value as a number if it is one, then as text."""
    key, value = _split_override(override)
    try:
        return key, float(value), ""
    except ValueError:
        return key, math.inf, value


def _split_override(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+"), value
