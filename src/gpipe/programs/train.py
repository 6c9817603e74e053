"""What happens between the checked settings of a run and its record.

The processes that are started for a run import this module, whichever program asked for them. What takes seconds to
load (timm, torchvision, torch's compiler) comes inside of the functions: a process that only starts others needs none
of it, and they wait for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpipe.config import RunConfig, to_plain, to_yaml
from gpipe.durable_files import write_flushed
from gpipe.launch import garbage_collection, processes, stops
from gpipe.launch.devices import check_devices
from gpipe.launch.errors import report_errors
from gpipe.launch.processes import Place, Processes
from gpipe.training.endings import Stopped

if TYPE_CHECKING:
    from gpipe.pipeline.timeline import Timeline

# What `train` loads. Loading it must not touch a GPU: a process whose CUDA has begun cannot be copied.
LOADED_ONCE = ("gpipe.programs.build", "gpipe.programs.outcome")


def start(run: RunConfig, folder: Path, overrides: list[str], *, hints: bool = True) -> None:
    """Start the processes that train, or print the plan alone; an error is one message and an exit with status 1.

    folder: the run's. overrides: those of the command line. hints: say in the end what to try next.
    """
    with report_errors(debug=run.launch.debug):
        if (run.trainer.resume_from, run.init_from) != (None, None):
            from gpipe.programs.build import check_checkpoints

            check_checkpoints(run)
        if run.trainer.dry_run:
            _print_plan(run)
            return
        launch = run.launch
        check_devices(launch.num_processes, launch.device.value, launch.num_threads, launch.pin_cores)
    processes.run(train, _processes_of(run, folder), run, overrides, hints)


def train(place: Place, folder: Path, run: RunConfig, overrides: list[str], hints: bool) -> None:
    """Build and train what `run` says, in each of its processes; the first one writes and speaks.

    Goes on where an earlier session in this folder stopped. Raises SystemExit(75) where this one was asked to stop.
    """
    from gpipe.planning.report import print_plan
    from gpipe.programs import build, outcome

    garbage_collection.resume()
    build.check_earlier(run, folder)
    layers = build.build_layers(run)
    partitions, planner = build.share_partitions(run, layers, place)
    plan = None
    if planner is not None:
        write_flushed(folder / "config.yaml", to_yaml(run))
        plan = print_plan(planner, build.build_setting(run, place), run.name)
    pipeline = build.build_pipeline(run, layers, partitions, place)
    timelines: list[Timeline] = []
    try:
        with build.build_tracker(run, folder, overrides, enabled=place.is_main) as tracker:
            trainer = build.build_trainer(run, pipeline, place, folder, tracker, timelines.append)
            tracker.begin([] if plan is None else plan.rows())
            with trainer.progress:
                summary = trainer.train()
            if plan is not None:
                timeline = timelines[-1] if timelines else None
                outcome.finish(folder, to_plain(run), plan, summary, timeline, place, overrides, tracker, hints=hints)
    except Stopped as stopped:
        if place.is_main:
            print(stopped, flush=True)
        pipeline.close()
        raise SystemExit(stops.STOPPED) from None
    pipeline.close()


def _print_plan(run: RunConfig) -> None:
    from gpipe.planning.report import print_plan
    from gpipe.programs import build

    print_plan(build.build_planner(run, build.accelerator_at_hand(run)), build.build_setting(run), run.name)


def _processes_of(run: RunConfig, folder: Path) -> Processes:
    """Return how many processes the run wants, and of which kind; `folder` is the run's."""
    return Processes(
        num_stages=run.pipeline.num_stages,
        num_replicas=run.launch.num_replicas,
        num_processes=run.launch.num_processes,
        num_threads=run.launch.num_threads,
        device=run.launch.device.value,
        timeout_seconds=run.pipeline.timeout_seconds,
        folder=folder,
        debug=run.launch.debug,
        stages_per_device=run.pipeline.stages_per_device,
        pin_cores=run.launch.pin_cores,
        max_restarts=run.launch.max_restarts,
        modules=LOADED_ONCE,
    )
