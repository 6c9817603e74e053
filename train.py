"""Train a model through a pipeline: compose the settings, start the processes, build, train. See `--help`."""
# ruff: noqa: E402

from gpipe.launch import garbage_collection, stops, terminal

# Before anything that takes its time to load: a stop at any moment is one in good order.
stops.listen()
terminal.outlive_readers()
garbage_collection.pause()

import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from gpipe.config import RunConfig, newest_run, register_schemas, to_run
from gpipe.launch.errors import report_errors, report_hydra_errors
from gpipe.programs.resume import continued
from gpipe.programs.sweep import run_job

register_schemas()


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(composed: DictConfig) -> float | None:
    """Check the composed settings and the data, then train; a job of a sweep returns its top-1."""
    job = HydraConfig.get()
    folder, overrides = Path(os.path.relpath(job.runtime.output_dir)), list(job.overrides.task)
    if job.mode is RunMode.MULTIRUN:
        return run_job(folder, overrides, composed.data.name, partial(check, composed), train)
    try:
        with report_errors(debug=composed.launch.debug):
            run = check(composed)
            with continued(run, folder, is_dated=is_dated(job)) as at:
                train(run, at, overrides)
    finally:
        with suppress(OSError):
            os.removedirs(folder)  # those that are empty, because nothing was trained
    return None


def is_dated(job: HydraConf) -> bool:
    """Say whether the run's folder is named after the moment, and not by the user: then another one does as well."""
    return "${date_folder:" in OmegaConf.to_yaml(job.run)


def check(composed: DictConfig) -> RunConfig:
    """Return the checked settings; an error, such as data that is not there, comes before anything heavy is loaded."""
    run = to_run(composed)
    if run.init_from is not None:
        run = replace(run, init_from=newest_run(run.init_from))
    if not run.trainer.dry_run:
        from gpipe.data import check_data

        check_data(run.data.name, run.data.root)
    return run


def train(run: RunConfig, folder: Path, overrides: list[str], *, hints: bool = True) -> None:
    """Load what trains, start the processes, and train; or print the plan alone."""
    from gpipe.programs.train import start

    start(run, folder, overrides, hints=hints)


if __name__ == "__main__":
    with report_hydra_errors():
        main()
