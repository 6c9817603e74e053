"""Add the records in the steps' folders to the claims."""

from __future__ import annotations

from pathlib import Path

from experiments.gpu.steps import Step
from gpipe.programs.jobs import read_jobs
from gpipe.records import read_records
from reproductions import RUNS_FILE
from reproductions.additions import add_jobs, add_records


def publish(step: Step, folder: Path, root: Path) -> None:
    """Add the records of a step that is done to its claim; the pages are rendered afterwards.

    Args:
        step: makes records.
        folder: of the step.
        root: of the repository whose claims have them.
    """
    assert step.claim is not None
    if step.sweep is not None:
        words = [word for word in step.words if not word.startswith("hydra.sweep.dir=")]
        add_jobs(step.claim, step.sweep, " ".join(["python", *words]), read_jobs(folder / "jobs"), root)
    else:
        add_records(step.claim, read_records(folder / RUNS_FILE), root)
