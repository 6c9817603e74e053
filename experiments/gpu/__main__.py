"""Test the device path on this machine's GPUs, measure what is labelled "not run", and render the pages.

    make gpu

Runs the steps of steps.py one after another, each in its own process with a time limit: ten to fifteen minutes on one
H100 or H200, half an hour at most. With several GPUs it also measures Tables 2 and 3 and the bubble, for up to two and
a half hours. A step that fails does not stop the others. Running the same command again continues with the steps that
are not done. runs/gpu has the log of each step; remove it to start over. Clones torchgpipe's repository, whose
AmoebaNet is measured beside ours.
"""

import argparse
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch

from experiments.gpu.progress import Progress
from experiments.gpu.steps import TORCHGPIPE, Step, list_steps
from gpipe.programs.jobs import read_jobs
from gpipe.records import read_records
from reproductions import ROOT, RUNS_FILE
from reproductions.additions import add_jobs, add_records
from reproductions.pages import write_pages


def publish(step: Step, folder: Path, root: Path) -> None:
    """Add the records in the folder of a step that is done to its claim in a repository; render the pages later."""
    assert step.claim is not None
    if step.sweep is not None:
        words = [word for word in step.words if not word.startswith("hydra.sweep.dir=")]
        add_jobs(step.claim, step.sweep, " ".join(["python", *words]), read_jobs(folder / "jobs"), root)
    else:
        add_records(step.claim, read_records(folder / RUNS_FILE), root)


if __name__ == "__main__":
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "gpu", help="of the steps; default: runs/gpu")
    parser.add_argument("--torchgpipe", default=TORCHGPIPE[0], help="the repository to clone; default: %(default)s")
    parser.add_argument("--small", action="store_true", help="rehearse with tiny models; needs --pages")
    parser.add_argument("--pages", type=Path, default=ROOT, help="a copy of the repository whose pages are rendered")
    options = parser.parse_args()
    if options.small and options.pages == ROOT:
        parser.error("--small needs --pages FOLDER, a copy of the repository: tiny models do not belong on its pages.")
    if (num_gpus := torch.cuda.device_count()) == 0:
        raise SystemExit("not run: torch finds no GPU here; make gpu tests and measures on a machine that has one.")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and end the step that is under way
    listed = list_steps(small=options.small, torchgpipe=(options.torchgpipe, TORCHGPIPE[1]))
    steps = [step for step in listed if step.num_gpus <= num_gpus]
    progress = Progress(options.folder, ROOT)
    ends = list(progress.run(steps))
    # Only now: records of a repository with changed files would say so.
    new = [(step, end) for step, end in ends if step.claim and end.failure is None and not end.is_published]
    for step, _ in new:
        publish(step, progress.folder / step.name, options.pages)
    if new:
        write_pages(options.pages)
    for step, end in new:  # what is interrupted before is published again, which adds nothing twice
        progress.note_end(step, replace(end, is_published=True))
    failed = [step.name for step, end in ends if end.failure is not None]
    print(f"{len(ends) - len(failed)} of {len(ends)} steps are done, and their records are on the pages.")
    if failed:
        raise SystemExit(f"error: {', '.join(failed)} failed: see the logs, then run make gpu again.")
