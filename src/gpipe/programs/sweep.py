"""Sweeps: each job of a grid or a search runs once, and a table shows the results of all.

    runs/sweep-<id>/                   the id follows from the command line: the same command again goes on here
      03_seed1_c6408c82/               a run's folder: the job's number, what is its own, a digest of its overrides
        overrides.txt                  its overrides, one per line
        outcome.json                   done, failed or not run, and why
        record.json, checkpoints/ ...  where it is done
      set_aside/                       folders of jobs whose settings have changed since
      started_from.txt                 the runs that its jobs start from
      summary.md                       the table

A job that has a record of the same settings is not run again; an unfinished one continues from its last checkpoint.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, Protocol

from hydra.conf import HydraConf
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from gpipe.config import RunConfig, read_yaml, to_plain
from gpipe.config.plan import PlanConfig
from gpipe.data import DataMissing
from gpipe.durable_files import write_flushed
from gpipe.environment_secrets import redact
from gpipe.launch.devices import DevicesMissing, check_devices
from gpipe.launch.errors import ERROR_FILE
from gpipe.programs.folder_lock import FolderHeld, hold
from gpipe.programs.jobs import Outcome, describe_best, read_job_record, read_jobs, summarize, write_outcome
from gpipe.programs.resume import CONFIG_FILE, clear
from gpipe.records import RECORD_FILE, Record, command_line, is_reusable

OVERRIDES_FILE = "overrides.txt"


class Train(Protocol):
    """Trains a run in a folder."""

    def __call__(self, run: RunConfig, folder: Path, overrides: list[str], *, hints: bool = True) -> None:
        """Train, or print an error's message and raise SystemExit(1)."""


def run_job(
    folder: Path, overrides: list[str], data: str, check: Callable[[], RunConfig], train: Train
) -> float | None:
    """Run one job of a sweep unless it is done; return its top-1, which a search maximises.

    If the job cannot run or fails, its outcome says why and the other jobs continue; only a signal ends the sweep.
    A job that another process is running is left to it.

    Args:
        folder: the job's folder.
        overrides: its words of the command line.
        data: the data set's name.
        check: returns the job's settings, or raises.
        train: trains them.
    """
    label = " ".join(word for word in overrides if word not in sys.argv) or "the only one"
    try:
        with hold(folder):
            return _run_held_job(label, folder, overrides, data, check, train)
    except FolderHeld as busy:
        print(f"\nleft out: {label}: {busy}", flush=True)
        return None


def _run_held_job(
    label: str, folder: Path, overrides: list[str], data: str, check: Callable[[], RunConfig], train: Train
) -> float | None:
    """Run a job whose folder is locked."""
    made = partial(Outcome, overrides=overrides, data=data)
    try:
        run = check()
        record = _record(folder, run)
        lack = None if record is not None else _lack_of_devices(run)
    except DataMissing:
        print(f"\nnot run: {label}: data missing", flush=True)
        write_outcome(folder, made("not run", reason="data missing"))
        return None
    except Exception as error:  # noqa: BLE001 - whatever it is, it ends this job alone
        reason = redact(str(error))
        print(f"\njob: {label}", flush=True)
        print(f"error: {reason}", file=sys.stderr, flush=True)
        write_outcome(folder, made("failed", reason=reason))
        return None
    if lack is not None:
        print(f"\nnot run: {label}: {lack}", flush=True)
        write_outcome(folder, made("not run", reason=lack, config=to_plain(run)))
        return None
    print(f"\n{'job' if record is None else 'done before'}: {label}", flush=True)
    if record is None:
        try:
            clear(folder, run)
            write_flushed(folder / OVERRIDES_FILE, "".join(f"{override}\n" for override in overrides))
            train(run, folder, overrides, hints=False)
        except SystemExit as end:
            if end.code != 1:
                raise
            write_outcome(folder, made("failed", reason=_reason(folder), config=to_plain(run)))
            return None
        record = _record(folder, run)
    write_outcome(folder, made("done"))
    return None if record is None else record.results.get("top1")


def mention_sweep(job: HydraConf) -> None:
    """Say that a run is one of a sweep, where its command line says nothing of what the sweep varies."""
    said = {word.lstrip("+").partition("=")[0] for word in job.overrides.task}
    swept = [key.lstrip("+") for key in job.sweeper.get("params") or {}]
    if not said.intersection(swept) and swept and os.environ.get("RANK", "0") == "0":
        print(f"This is one run, of a sweep over {', '.join(swept)}: add -m for the sweep.", flush=True)


class SweepEnd(Callback):
    """Print and write the table of a sweep after its last job; add its records to a reproduction."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse a launcher where there is no sweep: it would start nothing."""
        if (launcher := config.hydra.runtime.choices.get("hydra/launcher")) not in (None, "basic"):
            raise SystemExit(
                f"error: hydra/launcher={launcher} starts the jobs of a sweep, but this is a single run: add -m, which "
                "makes it a sweep of one job."
            )

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse what no job can do before the first one starts, such as to reach a cluster that is not here."""
        if OmegaConf.get_type(config) is PlanConfig:
            raise SystemExit(
                "error: -m, or hydra.mode=MULTIRUN, asks for a sweep, expected one plan: start plan.py once for each."
            )
        launcher = str(OmegaConf.select(config, "hydra.launcher._target_"))
        if launcher.endswith(".SlurmLauncher") and which("srun") is None:
            raise SystemExit(
                "error: hydra/launcher starts jobs of SLURM, but this machine has no srun: start train.py on a login "
                "node of the cluster, or set hydra/launcher=submitit_local to try it here."
            )
        evaluation = OmegaConf.select(config, "trainer.evaluation")
        if _is_search(config) and (evaluation.every_epochs, evaluation.every_steps) == (None, None):
            raise SystemExit(
                "error: trainer.evaluation.every_epochs and every_steps are null, but a search compares the top-1 of "
                "its trials: set one of them, such as trainer.evaluation.every_epochs=1."
            )
        runs = Path(config.hydra.runtime.cwd) / "reproductions" / f"{config.reproduction}" / "runs.jsonl"
        if config.reproduction is not None and not (find_spec("reproductions") and runs.exists()):
            raise SystemExit(
                f"error: reproduction is {config.reproduction}, but there is no {runs}: start train.py in the root of "
                "its repository, or set reproduction=null."
            )
        folder = Path(config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:  # by the clock of the disk, which may be another host's
            self._began = os.fstat(file.fileno()).st_mtime

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Summarise the sweep's jobs; exit with status 1 if one has failed.

        Each job that it did, or found done before, has written its outcome since the beginning. Other jobs in the
        folder are of an edited experiment's earlier form, or another process does them.
        """
        folder = Path(config.hydra.sweep.dir)
        found = read_jobs(folder)
        jobs = [job for job in found if job.written >= self._began]
        summarize(folder, jobs, [job for job in found if job.written < self._began])
        if _is_search(config):
            print(describe_best(jobs), flush=True)
        if config.reproduction is not None:
            from reproductions.additions import add_jobs  # no training waits for the tables of all pages
            from reproductions.pages import write_pages

            root = Path(config.hydra.runtime.cwd)
            add_jobs(config.reproduction, config.name, command_line(), jobs, root)
            write_pages(root)
            print(f"The records, and why jobs did not run, are in reproductions/{config.reproduction}.", flush=True)
        if any(job.outcome.status == "failed" for job in jobs):
            raise SystemExit(1)


def _is_search(config: DictConfig) -> bool:
    return str(OmegaConf.select(config, "hydra.sweeper._target_")).endswith(".OptunaSweeper")


def _lack_of_devices(run: RunConfig) -> str | None:
    """Return what a job needs and this machine lacks; None if it lacks nothing."""
    launch = run.launch
    try:
        if not run.trainer.dry_run:
            check_devices(launch.num_processes, launch.device.value, launch.num_threads, launch.pin_cores)
    except DevicesMissing as missing:
        return missing.reason
    return None


def _record(folder: Path, run: RunConfig) -> Record | None:
    """Return the record in a job's folder if the job had the same settings.

    They are compared as they were said: the record has what `auto` came to on its device.
    """
    path = folder / RECORD_FILE
    if not path.exists() or not is_reusable(read_yaml(folder / CONFIG_FILE), to_plain(run)):
        return None
    return read_job_record(path)


def _reason(folder: Path) -> str:
    """Return the message of the error that ended a job."""
    path = folder / ERROR_FILE
    first, _, _ = path.read_text(encoding="utf-8").partition("\n") if path.exists() else ("", "", "")
    return first.removeprefix("error: ") or "see its message above"  # on a full disk there is no file
