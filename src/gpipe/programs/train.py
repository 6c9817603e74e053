"""Train with checked settings, and write a record.

The processes of a run import this module, whichever program starts them. Modules that take seconds to load (timm,
torchvision, torch's compiler) are imported inside functions, because a process that only starts others needs none.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gpipe.config import ConfigError, RunConfig, TimmConfig, TransformersConfig, to_yaml
from gpipe.durable_files import write_flushed
from gpipe.launch import garbage_collection, processes, stops
from gpipe.launch.devices import check_devices
from gpipe.launch.errors import report_errors
from gpipe.launch.processes import Place, Processes
from gpipe.training.endings import Stopped
from gpipe.training.tracking import check_mode

if TYPE_CHECKING:
    from gpipe.pipeline.timeline import Timeline

# What `train_in_process` imports. Importing it must not touch a GPU: a process that has started CUDA cannot fork.
LOADED_ONCE = ("gpipe.programs.build", "gpipe.programs.outcome")


def launch_training(run: RunConfig, folder: Path, overrides: list[str], *, hints: bool = True) -> None:
    """Start the processes that train, or only print the plan; print an error as one message and exit with status 1.

    `overrides` are the words of the command line that choose the settings; `hints` suggest at the end what to try next.
    """
    with report_errors(debug=run.launch.debug):
        if (run.trainer.resume_from, run.init_from) != (None, None):
            from gpipe.programs.chosen_checkpoint import check_checkpoints, newest_manifest

            if newest_manifest(folder) is None:  # a run with checkpoints of its own needs no other's
                check_checkpoints(run)
        if run.trainer.dry_run:
            _print_plan(run)
            return
        mode = run.tracking.mode.value
        if os.environ.get("RANK", "0") == "0" and (reason := check_mode(mode)) is not None:  # only that one tracks
            raise ConfigError(f"tracking.mode is {mode}, but {reason}.")
        launch = run.launch
        if isinstance(run.model, TimmConfig | TransformersConfig):
            from gpipe.programs.workloads import workload_of

            workload_of(run).check()
        check_devices(launch.num_processes, launch.device.value, launch.num_threads, launch.pin_cores)
    processes.run(train_in_process, describe_processes(run, folder), run, overrides, hints)


def train_in_process(place: Place, folder: Path, run: RunConfig, overrides: list[str], hints: bool) -> None:
    """Build and train this process's part of the run; the first process writes and prints.

    Continues where an earlier session in this folder stopped.

    Raises:
        SystemExit: with status 75, if this session was asked to stop.
    """
    from gpipe.pipeline.measurement.step_report import reset_peak_memory
    from gpipe.planning.accelerator import detect_accelerator
    from gpipe.planning.report import compare_with_plan, print_plan
    from gpipe.programs import build, outcome
    from gpipe.programs.chosen_checkpoint import check_earlier
    from gpipe.programs.layout import share_layout
    from gpipe.programs.precision import settle_precision

    place.heed_stop("loaded")
    garbage_collection.resume()
    check_earlier(run, folder)
    layers = build.build_layers(run)
    layout = share_layout(run, layers, place)
    place.heed_stop("planned")
    plan = None
    if layout.planned is not None:
        _, plan = layout.planned
        write_flushed(folder / "config.yaml", to_yaml(run))
        print_plan(*layout.planned, run.name)
    reset_peak_memory()  # leaves out earlier jobs of a sweep in this process, and planning
    pipeline = build.build_pipeline(run, layers, layout, place)
    del layers, layout  # frees the memory that other stages' layers may hold
    timelines: list[Timeline] = []

    def keep(timeline: Timeline) -> None:
        if plan is not None and not timelines and trainer.progress is not None:
            trainer.progress.message(compare_with_plan(plan, timeline))
        timelines[:] = [timeline]

    try:
        with build.build_tracker(run, folder, overrides, enabled=place.is_main) as tracker:
            trainer = build.build_trainer(run, pipeline, place, folder, tracker, keep)
            tracker.begin([] if plan is None else plan.rows())
            summary = trainer.train()
            if plan is not None:
                timeline = timelines[-1] if timelines else None
                settled = settle_precision(run, detect_accelerator(place.device_type))
                outcome.record_outcome(folder, settled, plan, summary, timeline, place, overrides, tracker, hints=hints)
    except Stopped as stopped:
        if place.is_main:
            print(stopped, flush=True)
        pipeline.close()
        raise SystemExit(stops.STOPPED) from None
    pipeline.close()


def _print_plan(run: RunConfig) -> None:
    from gpipe.planning.report import print_plan
    from gpipe.programs.calibration_files import find_calibration
    from gpipe.programs.layout import accelerator_at_hand, build_planner, build_setting
    from gpipe.programs.workloads import workload_of

    layers = workload_of(run).layers()  # kept alive, because tracing another library's model takes seconds
    accelerator = accelerator_at_hand(run)
    planner = build_planner(run, accelerator, calibration=find_calibration(run, accelerator))
    print_plan(planner, planner.plan(build_setting(run, accelerator)), run.name)
    del layers


def describe_processes(run: RunConfig, folder: Path) -> Processes:
    """Return the number and kind of processes that the run needs."""
    return Processes(
        num_stages=run.pipeline.num_stages,
        stages_per_device=run.pipeline.stages_per_device,
        timeout_seconds=run.pipeline.timeout_seconds,
        folder=folder,
        modules=LOADED_ONCE,
        **run.launch.values_but("shard_optimizer", "device_threads", "gpus_per_node"),
    )
