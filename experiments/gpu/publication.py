"""The records of the steps: from their folders to the pages."""

from __future__ import annotations

from pathlib import Path

from experiments.gpu.steps import Step
from gpipe.programs.jobs import read_jobs
from gpipe.records import append_record, read_records
from reproductions import FOLDER, RUNS_FILE
from reproductions.additions import add_jobs
from reproductions.pages import write_pages


def publish(step: Step, folder: Path, root: Path) -> None:
    """Add the records of a step that is done, and render all pages.

    Args:
        step: makes records.
        folder: of the step.
        root: of the repository whose pages have them.
    """
    assert step.claim is not None
    if step.sweep is not None:
        words = [word for word in step.words if not word.startswith("hydra.sweep.dir=")]
        add_jobs(step.claim, step.sweep, " ".join(["python", *words]), read_jobs(folder / "jobs"), root)
        return
    for record in read_records(folder / RUNS_FILE):
        append_record(root / FOLDER / step.claim / RUNS_FILE, record)
    write_pages(root)
