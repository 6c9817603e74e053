"""Sweeps: each job of a grid or a search runs once, and a table shows the results of all.

    runs/sweep-<id>/                   the id depends on the command line, so repeating a command continues here
      03_seed1_c6408c82/               a run's folder: the job's number, its own settings, a digest of its overrides
        overrides.txt                  its overrides, one per line
        outcome.json                   done, failed or not run, and why
        record.json, checkpoints/ ...  if it is done
      set_aside/                       folders of jobs whose settings have changed since
      started_from.txt                 the runs that its jobs start from
      summary.md                       the table

A job that has a record with the same settings is not run again; an unfinished one continues from its last checkpoint.
"""

import math
import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from hydra.conf import HydraConf
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from gpipe.config import ConfigError, RunConfig, read_yaml, to_plain
from gpipe.config.plan import PlanConfig
from gpipe.data import DataMissing
from gpipe.durable_files import write_flushed
from gpipe.environment_secrets import redact
from gpipe.launch.devices import DevicesMissing, check_devices
from gpipe.launch.errors import ERROR_FILE
from gpipe.programs.folder_lock import FolderHeld, hold
from gpipe.programs.jobs import Outcome, describe_best, read_job_record, read_jobs, summarize, write_outcome
from gpipe.programs.resume import CONFIG_FILE, clear
from gpipe.records import OBSERVERS, RECORD_FILE, Record, command_line, same_settings

OVERRIDES_FILE = "overrides.txt"
_WORST = -math.inf


Train = Callable[[RunConfig, Path, list[str]], None]


def run_job(
    folder: Path, overrides: list[str], data: str, check: Callable[[], RunConfig], train: Train
) -> float | None:
    """Run one job of a sweep unless it is done; return its top-1, which a search maximises.

    If the job cannot run or fails, its outcome says why and the other jobs continue; only a signal ends the sweep. The
    job's value is then worse than any top-1: a search cannot learn from a job without a value, and would end without a
    table if all jobs failed. A job that another process is running is left to it.

    `data` is the name of its data set. `check` returns its settings, or raises. `train` trains them in the folder, or
    prints an error's message and raises SystemExit(1).
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
    make_outcome = partial(Outcome, overrides=overrides, data=data)
    try:
        run = check()
        record, launch = _find_record(folder, run), run.launch
        if record is None and not run.trainer.dry_run:
            check_devices(launch.num_processes, launch.device.value, launch.num_threads, launch.pin_cores)
    except DevicesMissing as missing:
        print(f"\nnot run: {label}: {missing.reason}", flush=True)
        write_outcome(folder, make_outcome("not run", reason=missing.reason, config=to_plain(run)))
        return _WORST
    except DataMissing:
        print(f"\nnot run: {label}: data missing", flush=True)
        write_outcome(folder, make_outcome("not run", reason="data missing"))
        return _WORST
    except Exception as error:  # noqa: BLE001 - any error ends this job alone
        reason = redact(str(error)).encode(errors="backslashreplace").decode()  # a file's name may not be UTF-8
        print(f"\njob: {label}", flush=True)
        print(f"error: {reason}", file=sys.stderr, flush=True)
        write_outcome(folder, make_outcome("failed", reason=reason))
        return _WORST
    print(f"\n{'job' if record is None else 'done before'}: {label}", flush=True)
    if record is None:
        try:
            clear(folder, run)
            write_flushed(folder / OVERRIDES_FILE, "".join(f"{override}\n" for override in overrides))
            train(run, folder, overrides)
        except SystemExit as end:
            if end.code != 1:
                raise
            failed = make_outcome("failed", reason=_read_reason(folder), config=to_plain(_settle(run)))
            write_outcome(folder, failed)
            return _WORST
        record = _find_record(folder, run)
    write_outcome(folder, make_outcome("done"))
    return None if record is None else record.results.get("top1")


def mention_sweep(job: HydraConf) -> None:
    """Mention that a run is one of a sweep, if its command line sets nothing that the sweep varies."""
    said = {word.lstrip("+").partition("=")[0] for word in job.overrides.task}
    swept = [key.lstrip("+") for key in job.sweeper.get("params") or {}]
    if os.environ.get("RANK", "0") != "0":
        return
    if not said.intersection(swept) and swept:
        print(f"This is a single run of a sweep over {', '.join(swept)}: add -m for the sweep.", flush=True)
    elif "reproduction" in said and "reproduction=null" not in job.overrides.task:
        print(
            "This is a single run, and reproduction=... takes only a sweep's records: add -m for a sweep of one run.",
            flush=True,
        )


class SweepEnd(Callback):
    """Print and write the table of a sweep after its last job; add its records to a reproduction."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse a launcher without a sweep: it would start nothing."""
        if (launcher := config.hydra.runtime.choices.get("hydra/launcher")) not in (None, "basic"):
            raise SystemExit(
                f"error: hydra/launcher={launcher} starts the jobs of a sweep, but this is a single run: add -m, which "
                "makes it a sweep of one job."
            )
        _refuse_wrong_place(config, is_sweep=False)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before the first job starts, refuse what no job could do, such as reaching a cluster from elsewhere."""
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
        if _is_search(config):
            if (evaluation.every_epochs, evaluation.every_steps) == (None, None):
                raise SystemExit(
                    "error: trainer.evaluation.every_epochs and every_steps are null, but a search compares the top-1 "
                    "of its trials: set one of them, such as trainer.evaluation.every_epochs=1."
                )
            _refuse_other_searches(config.hydra.sweeper)
        _refuse_wrong_place(config, is_sweep=True)
        subdir = str(OmegaConf.to_container(config.hydra.sweep)["subdir"])  # type: ignore[index,call-overload]
        if "${" not in subdir or "/" in re.sub(r"\$\{.*\}", "", subdir):
            raise SystemExit(
                f"error: hydra.sweep.subdir is {subdir}, expected a name without slashes that differs by job: leave "
                "it out, or set it to '${hydra.job.num}'."
            )
        folder = Path(config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:  # the time of the disk's clock, which may be another host's
            self._began = os.fstat(file.fileno()).st_mtime

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Summarise the sweep's jobs; exit with status 1 if one has failed.

        Each job that the sweep ran, or found done, has written its outcome since the sweep began. Other jobs in the
        folder belong to an earlier version of the experiment, or another process runs them.
        """
        folder = Path(config.hydra.sweep.dir)
        found = read_jobs(folder)
        jobs = [job for job in found if job.written >= self._began]
        summarize(folder, jobs, [job for job in found if job.written < self._began])
        if _is_search(config) and (best := describe_best(jobs)):
            print(best, flush=True)
        if config.reproduction is not None:
            from reproductions.additions import add_jobs  # no training waits for the tables of all pages
            from reproductions.pages import write_pages

            root = Path(config.hydra.runtime.cwd)
            add_jobs(config.reproduction, config.name, command_line(), jobs, root)
            write_pages(root)
            print(f"The records, and why jobs did not run, are in reproductions/{config.reproduction}.", flush=True)
        if any(job.outcome.status == "failed" for job in jobs):
            raise SystemExit(1)


def _refuse_wrong_place(config: DictConfig, *, is_sweep: bool) -> None:
    """Refuse to change into a run's own folder, where a repeated command would not find its earlier runs.

    Refuse a claim that does not exist; a single run makes no use of claims, and may start outside the repository.
    """
    if OmegaConf.select(config, "hydra.job.chdir"):
        raise SystemExit(
            "error: hydra.job.chdir is true, expected false, because file names are relative to the folder where a "
            "program starts, and a run writes into its own folder anyway: leave it out."
        )
    root, name = Path(config.hydra.runtime.cwd), config.get("reproduction")
    found = root.glob("reproductions/*/runs.jsonl") if find_spec("reproductions") else ()
    claims = sorted(path.parent.name for path in found)
    if name in (None, *claims) or not (claims or is_sweep):
        return
    if not claims:
        raise SystemExit(f"error: reproduction is {name}, but {root} has no claims: start train.py in its repository.")
    raise SystemExit(f"error: reproduction is {name}, expected null, or one of {', '.join(claims)}: correct it.")


def _refuse_other_searches(sweeper: DictConfig) -> None:
    """Refuse a search for anything but the largest top-1, and a database: Optuna 2 does not work with SQLAlchemy 2."""
    if (direction := getattr(sweeper.direction, "name", sweeper.direction)) != "maximize":
        raise SystemExit(
            f"error: hydra.sweeper.direction is {direction}, expected maximize, because a search compares the top-1 of "
            "its trials: set hydra.sweeper.direction=maximize."
        )
    if sweeper.storage is not None:  # not shown, because it may have a password
        raise SystemExit(
            "error: hydra.sweeper.storage is set, expected null, because a search is kept in the sweep's folder: leave "
            "it out, and repeat the command to resume."
        )


def _is_search(config: DictConfig) -> bool:
    return str(OmegaConf.select(config, "hydra.sweeper._target_")).endswith(".OptunaSweeper")


def _settle(run: RunConfig) -> RunConfig:
    """Return a run's settings with what its device determines, as a record has them."""
    from gpipe.programs.layout import accelerator_at_hand
    from gpipe.programs.precision import settle_precision

    try:
        return settle_precision(run, accelerator_at_hand(run))
    except ConfigError:  # the device is missing: a dry run fails there
        return run


def _find_record(folder: Path, run: RunConfig) -> Record | None:
    """Return the record in a job's folder if the job had the same settings.

    Settings are compared as the user gave them; the record has what `auto` meant on its device.
    """
    path = folder / RECORD_FILE
    if not path.exists() or not same_settings(read_yaml(folder / CONFIG_FILE), to_plain(run), OBSERVERS):
        return None
    return read_job_record(path)


def _read_reason(folder: Path) -> str:
    path = folder / ERROR_FILE
    first, _, _ = path.read_text(encoding="utf-8").partition("\n") if path.exists() else ("", "", "")
    return first.removeprefix("error: ") or "see its message above"  # on a full disk there is no file
