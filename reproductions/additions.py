"""Add the records of a study, a run or a sweep to a claim; the pages are rendered afterwards, see pages.py."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpipe.programs.jobs import Outcome, SweepJob
from gpipe.records import (
    RECORD_FILE,
    Record,
    append_record,
    make_record,
    read_records,
    same_settings,
    without_places,
    write_records,
)
from reproductions import FOLDER, ROOT, RUNS_FILE
from reproductions.curve import read_curve, read_training

METRICS_FILE = "metrics.jsonl"
# The messages about a step whose loss or gradient is not finite, and about such an evaluation.
_NOT_FINITE = re.compile(
    r"\bthe (loss of step \d+ is|gradient of \S+ has the norm|\w*loss on .+ after step \d+ is) -?(nan|inf)\b"
)


def read_run(folder: Path) -> Record:
    """Read the record of a run, without the folders of this machine; add the curves of its log to the results."""
    record = without_places(read_records(folder / RECORD_FILE)[0])
    return replace(record, results={**record.results, **_read_curves(folder)})


def _read_curves(folder: Path) -> dict[str, Any]:
    """Return the curves of the evaluations and of the training steps from the log of a run."""
    metrics = folder / METRICS_FILE
    return {"curve": read_curve(metrics), "training": read_training(metrics)} if metrics.exists() else {}


def add_records(name: str, records: Iterable[Record], root: Path = ROOT) -> int:
    """Add records to a claim, without the folders of this machine; return how many were not there yet.

    A record that is already there is not added again: a resumed study passes its earlier runs, too.
    """
    path = root / FOLDER / name / RUNS_FILE
    there = read_records(path) if path.exists() else []
    new = [record for record in map(without_places, records) if record not in there]
    for record in new:
        append_record(path, record)
    return len(new)


def add_jobs(name: str, experiment: str, command: str, jobs: Sequence[SweepJob], root: Path = ROOT) -> None:
    """Add the records of a sweep to a claim.

    A record replaces an earlier one with the same settings. If a data set is not on this machine, one record states the
    reason; so does one record per job that lacks devices. A training that diverged is a result too: its record has the
    error as "failure", and the curves until then.

    Args:
        name: The claim's folder in reproductions/.
        experiment: The sweep's experiment.
        command: The sweep's command.
        jobs: The sweep's jobs.
        root: The root of the repository.

    Raises:
        FileNotFoundError: There is no such claim.
    """
    path = root / FOLDER / name / RUNS_FILE
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: start the sweep in the repository, or set reproduction=null.")

    def make(kind: str, outcome: Outcome, results: dict[str, Any]) -> Record:
        config = outcome.config or {"data": {"name": outcome.data}}
        seed = config.get("seed", 0)
        return without_places(
            make_record(kind=kind, command=command, experiment=experiment, config=config, seed=seed, results=results)
        )

    new = [read_run(job.folder) for job in jobs if job.record is not None]
    new += [
        make("measured", job.outcome, {"failure": job.outcome.reason, **_read_curves(job.folder)})
        for job in jobs
        if _is_diverged(job.outcome)
    ]
    unmade = [job.outcome for job in jobs if job.outcome.status == "not run"]
    without_data = {outcome.data: outcome for outcome in unmade if outcome.config is None}
    unmade = [*without_data.values(), *(outcome for outcome in unmade if outcome.config is not None)]
    new += [make("not run", outcome, {"reason": outcome.reason}) for outcome in unmade]
    old = [record for record in read_records(path) if not any(_replaces(other, record) for other in new)]
    write_records(path, [*old, *new])


def _replaces(new: Record, old: Record) -> bool:
    """Return whether a record replaces an old one.

    A record whose only result is a speed replaces only one of the same machine.
    """
    if (new.kind, new.experiment) != (old.kind, old.experiment) or not same_settings(new.config, old.config):
        return False
    is_speed = new.kind == "measured" and new.results.get("top1") is None and "failure" not in new.results
    return not is_speed or (new.hardware, new.config.get("launch")) == (old.hardware, old.config.get("launch"))


def _is_diverged(outcome: Outcome) -> bool:
    """Return whether the job failed because its loss, a gradient, or the loss of an evaluation was not finite."""
    return outcome.status == "failed" and _NOT_FINITE.search(outcome.reason or "") is not None
