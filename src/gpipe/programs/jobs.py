"""The jobs of a sweep: the outcome of each, and the table of all."""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
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


@dataclass(frozen=True)
class SweepJob:
    """The outcome and the folder of a job, its record if it is done, and when its outcome was written."""

    outcome: Outcome
    folder: Path
    record: Record | None
    written: float


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
    """Read the record of a job.

    Raises:
        ValueError: it is damaged.
    """
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

    Args:
        folder: the sweep's.
        jobs: its own jobs.
        others: the other jobs in its folder, of which only the names are shown.
    """
    shown = [figure for figure in _FIGURES if any(job.record and figure.value(job.record) is not None for job in jobs)]
    means = "".join(f"\n{line}\n" for line in _average_seeds(jobs))
    if others:
        names = ", ".join(sorted(job.folder.name for job in others))
        means += f"\nleft out, because this sweep did not run them: {names}\n"
    table = _render(_table(jobs, shown))
    path = folder / SUMMARY_FILE
    write_flushed(path, table + means)
    if sys.stdout.isatty():
        columns = get_terminal_size().columns
        while shown and len(table.partition("\n")[0]) > columns:
            table = _render(_table(jobs, shown := shown[:-1]))
    print(f"\n{table}{means}")
    found = Counter(job.outcome.status for job in jobs)
    counts = [f"{found[status]} {status}" for status in ("done", "not run", "failed") if found[status]]
    print(f"{', '.join(counts) or '0 done'}; the table is in {path}", flush=True)


def _render(table: Table) -> str:
    text = StringIO()  # not a terminal, so without colours
    Console(file=text, width=_WIDTH, highlight=False, markup=False).print(table)  # [sw] is a language, not markup
    return "".join(line.rstrip() + "\n" for line in text.getvalue().splitlines() if line.strip())


def describe_best(jobs: Sequence[SweepJob]) -> str:
    """Return a line on the job of a search with the largest top-1; empty if none has one."""
    scores = [(job.record.results.get("top1"), job) for job in jobs if job.record is not None]
    known = [(top1, job) for top1, job in scores if top1 is not None]
    if not known:
        return ""
    top1, job = max(known, key=lambda pair: pair[0])
    return f"the best trial is {job.folder.name}, with top-1 {top1:.2%}: {' '.join(job.outcome.overrides)}"


def _average_seeds(jobs: Sequence[SweepJob]) -> list[str]:
    """Return a line per group of jobs that differ only in their seeds: mean and standard deviation of each figure."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for job in jobs:
        if job.record is not None:
            words = _settings(job)
            others = (f"{key}={value}" for key, value in words.items() if key != "seed")
            # Overrides do not show what is in files, so settings are compared too: without those that depend on the
            # seed, and without the memory limit, which depends on the host.
            of_seed = (key for key, value in words.items() if "${seed}" in f"{value}")
            found = without(("seed", "pipeline.memory_limit_bytes", *of_seed), job.record.settings)
            settings = json.dumps(found, sort_keys=True)
            groups.setdefault((" ".join(sorted(others)), settings), []).append(job.record)
    shared = set.intersection(*(set(name.split()) for name, _ in groups)) if len(groups) > 1 else set()
    lines = []
    for (name, _), records in groups.items():
        parts = []
        for figure in _FIGURES[:3]:
            values = [value for record in records if (value := figure.value(record)) is not None]
            if len(values) > 1:
                parts.append(f"{figure.name} {figure.format(mean(values))} ± {figure.format(stdev(values))}")
        if parts:
            own = " ".join(word for word in name.split() if word not in shared) if len(groups) > 1 else ""
            lines.append(f"{own}{': ' if own else ''}{', '.join(parts)} (mean and deviation over {len(records)} seeds)")
    return lines


def _table(jobs: Sequence[SweepJob], shown: Sequence["_Figure"]) -> Table:
    """Return a table with one row per job: the overrides in which the jobs differ, some figures, and the outcome.

    Jobs that lack the same data or devices share a row.
    """
    settings = [_settings(job) for job in jobs]
    known = dict.fromkeys(key for part in settings for key in part)
    keys = [key for key in known if len({part.get(key) for part in settings}) > 1]
    table = Table(box=MARKDOWN)
    for key in keys:
        table.add_column(key)
    for figure in shown:
        table.add_column(figure.name, justify="right")
    table.add_column("outcome")
    table.add_column("folder")
    for group in _group_jobs(jobs):
        parts = [_settings(job) for job in group]
        shared = [values.pop() if len(values := {part.get(key, "") for part in parts}) == 1 else "" for key in keys]
        table.add_row(
            *shared,
            *(figure.cell(group[0].record) for figure in shown),
            _describe_outcome(group),
            group[0].folder.name if len(group) == 1 else "",
        )
    return table


def _group_jobs(jobs: Sequence[SweepJob]) -> list[list[SweepJob]]:
    """Group the jobs that were not run for the same reason on the same data; every other job is its own group."""
    groups: dict[object, list[SweepJob]] = {}
    for job in jobs:
        is_run = job.outcome.status != "not run"
        groups.setdefault(job.folder if is_run else (job.outcome.data, job.outcome.reason), []).append(job)
    return list(groups.values())


def _describe_outcome(group: Sequence[SweepJob]) -> str:
    outcome = group[0].outcome
    why = f": {outcome.reason.splitlines()[0]}" if outcome.reason else ""
    return f"{outcome.status}{why}" + (f" ({len(group)} runs)" if len(group) > 1 else "")


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


def _settings(job: SweepJob) -> dict[str, str]:
    """Return a job's overrides by key; experiment=a of a grid replaces +experiment=b of the command line."""
    return dict(map(_split_override, sorted(job.outcome.overrides, key=lambda override: not override.startswith("+"))))


@dataclass(frozen=True)
class _Figure:
    """A column of the table: how to find a figure in a record, and how to format it."""

    name: str
    value: Callable[[Record], float | None]
    format: Callable[[float], str]

    def cell(self, record: Record | None) -> str:
        value = None if record is None else self.value(record)
        return "" if value is None else self.format(value)


def _result(name: str) -> Callable[[Record], float | None]:
    return lambda record: record.results.get(name)


def _loss(record: Record) -> float | None:
    evaluation: dict[str, float] = next(iter(record.results.get("evaluation", {}).values()), {})
    return evaluation.get("loss")


_FIGURES = (
    _Figure("top-1", _result("top1"), "{:.2%}".format),
    _Figure("top-5", _result("top5"), "{:.2%}".format),
    _Figure("loss", _loss, "{:.4f}".format),
    _Figure("examples/s", lambda record: record.examples_per_second, "{:.4g}".format),
    _Figure("s per step, data apart", _result("step_seconds"), "{:.3g}".format),
    _Figure("bubble", _result("bubble"), "{:.1%}".format),
    _Figure("bubble, equal stages", _result("equal_stages_bubble"), "{:.1%}".format),
    _Figure("MiB, peak", _result("peak_memory_bytes"), lambda value: f"{value / 2**20:.0f}"),
    _Figure("minutes", _result("seconds"), lambda value: f"{value / 60:.1f}"),
)
