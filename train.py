"""Train a model through a pipeline: compose the settings, start the processes, build, train. See `--help`."""
# ruff: noqa: E402

from gpipe.launch import garbage_collection, stops, terminal

# First, so that a run can be stopped cleanly at any moment.
stops.listen()
terminal.outlive_readers()
garbage_collection.pause()

import os
from contextlib import suppress
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from gpipe._compat.hydra import surround_runs
from gpipe.config import ConfigError, RunConfig, name_sources, register_schemas, to_run
from gpipe.launch.errors import report_errors
from gpipe.programs.automatic import choose_pipeline, is_open, spell_out
from gpipe.programs.complete import check_run_data, complete, refuse_too_few_images
from gpipe.programs.resume import name_runs, resume_folder
from gpipe.programs.sweep import mention_sweep, run_job

register_schemas()


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(composed: DictConfig) -> float | None:
    """Check the composed settings and the data, then train; a job of a sweep returns its top-1."""
    job = HydraConfig.get()
    train = partial(load_and_train, composed, name_sources(job))
    folder, overrides = Path(os.path.relpath(job.runtime.output_dir)), list(job.overrides.task)
    if job.mode is RunMode.MULTIRUN:
        check = partial(check_settings, composed)
        return run_job(folder, overrides, composed.data.name, check, partial(train, hints=False))
    try:
        if composed.evaluate is not None:
            from gpipe.programs.evaluate import launch_evaluation

            launch_evaluation(composed, folder, overrides)
            return None
        with report_errors(debug=composed.launch.debug):
            run = check_settings(composed)
            mention_sweep(job)
            is_dated = "${date_folder:" in OmegaConf.to_yaml(job.run)  # and not named by the user
            with resume_folder(run, folder, is_dated=is_dated) as at:
                train(run, at, overrides)
    finally:
        with suppress(OSError):
            os.removedirs(folder)  # if it is empty, because nothing was trained
    return None


def check_settings(composed: DictConfig) -> RunConfig:
    """Return the checked settings; refuse wrong settings and missing data before torch is loaded."""
    job = HydraConfig.get()
    if is_open(composed):
        composed = choose_pipeline(composed, job.overrides.task)
    run = name_runs(to_run(composed), Path(job.sweep.dir) if job.mode is RunMode.MULTIRUN else None)
    if run.evaluate is not None:  # outside a sweep, `main` evaluates
        raise ConfigError(
            f"evaluate is {run.evaluate} in a sweep, expected null: evaluate without -m, one run at a time."
        )
    refuse_too_few_images(run)
    if not run.trainer.dry_run:
        check_run_data(run)
    return complete(run)


def load_and_train(
    composed: DictConfig,
    sources: list[str],
    run: RunConfig,
    folder: Path,
    overrides: list[str],
    *,
    hints: bool = True,
) -> None:
    """Load torch, start the processes, and train; or only print the plan."""
    stops.exit_before_start(stops.find_reason())  # loading torch takes seconds
    from gpipe.programs.train import launch_training

    launch_training(run, folder, [*sources, *spell_out(composed, run, overrides)], hints=hints)


if __name__ == "__main__":
    with surround_runs(report_errors):
        main()
