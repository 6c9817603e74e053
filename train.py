"""Train a model through a pipeline: compose the settings, start the processes, build, train. See `--help`."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from gpipe.config import RunConfig, refuse_overruled_data, register_schemas, to_plain, to_run, to_yaml
from gpipe.launch.errors import one_message

if TYPE_CHECKING:
    from gpipe.launch.processes import Place
    from gpipe.pipeline.timeline import Timeline

register_schemas()


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(composed: DictConfig) -> None:
    """Check the composed settings and that the data is there, then start what they say."""
    job = HydraConfig.get()
    folder = Path(os.path.relpath(job.runtime.output_dir))
    try:
        with one_message(debug=composed.launch.debug):
            refuse_overruled_data(composed, job.overrides.task)
            run = to_run(composed)
            if not run.trainer.dry_run:
                from gpipe.data import check_image_set

                check_image_set(run.data.name, run.data.root)
        start(run, folder, list(job.overrides.task))
    finally:
        with suppress(OSError):
            os.removedirs(folder)  # those that are empty, because nothing was trained


def start(run: RunConfig, folder: Path, overrides: list[str]) -> None:
    """Start the processes that train, or print the plan alone."""
    from gpipe import build
    from gpipe.launch import processes
    from gpipe.planning.plan import print_plan

    if run.trainer.dry_run:
        with one_message(debug=run.launch.debug):
            print_plan(build.build_plan(run, build.build_layers(run)), run.name, build.name_processes(run))
    else:
        processes.run(train, build.build_processes(run, folder), run, overrides)


def train(place: "Place", folder: Path, run: RunConfig, overrides: list[str]) -> None:
    """Build and train what `run` says, in each of its processes; the first one writes and speaks."""
    from gpipe import build, outcome
    from gpipe.planning.plan import print_plan

    layers = build.build_layers(run)
    plan = build.build_plan(run, layers, place)
    if place.is_main:
        (folder / "config.yaml").write_text(to_yaml(run), encoding="utf-8")
        print_plan(plan, run.name, build.name_processes(run))
    pipeline = build.build_pipeline(run, layers, plan, place)
    timelines: list[Timeline] = []
    with build.build_tracker(run, folder, enabled=place.is_main) as tracker:
        trainer = build.build_trainer(run, pipeline, place, folder, tracker, timelines.append)
        with trainer.progress:
            summary = trainer.train()
    if place.is_main:
        outcome.finish(folder, to_plain(run), plan, summary, timelines[-1] if timelines else None, place, overrides)
    pipeline.close()


if __name__ == "__main__":
    main()
