"""Measure the layers of a run on this machine, for later plans: plan.py calibrate=true."""

from __future__ import annotations

from pathlib import Path

from gpipe.config import RunConfig
from gpipe.launch import garbage_collection, processes
from gpipe.launch.processes import Place
from gpipe.pipeline.microbatch import microbatch_sizes
from gpipe.planning.accelerator import Speed, detect_accelerator
from gpipe.planning.calibration import Calibration
from gpipe.planning.task_timing import measure_task_seconds
from gpipe.programs.build import build_layers
from gpipe.programs.calibration_files import FOLDER, describe_origin, find_path
from gpipe.programs.layout import measure_seconds, training_profiler
from gpipe.programs.precision import precision_of, settle_precision
from gpipe.programs.train import describe_processes
from gpipe.programs.workloads import workload_of


def calibrate(run: RunConfig) -> None:
    """Measure the layers in as many concurrent processes as the run has, and write the first one's results.

    Processes share memory and caches, so a process alone would be faster than beside the others.
    """
    processes.run(_measure, describe_processes(run, FOLDER), run)


def _measure(place: Place, _: Path, run: RunConfig) -> None:
    garbage_collection.resume()  # layers hold real memory here
    place.share("calibration", "begins")
    accelerator = detect_accelerator(place.device_type)
    layers = build_layers(run)
    measured = measure_seconds(run, layers, place.device_type, lambda _: None, splits=True)
    # Only a CPU's seconds per task are measured: a GPU's host runs ahead of it.
    task_seconds = accelerator.task_seconds if accelerator.is_gpu else measure_task_seconds()
    if not place.is_main:
        return
    workload = workload_of(run)
    size = max(microbatch_sizes(workload.num_examples // run.launch.num_replicas, run.pipeline.num_microbatches))
    settled = settle_precision(run, accelerator)
    planned = Speed.of(accelerator, precision_of(settled)).seconds(training_profiler(settled)(size))
    found = Calibration(describe_origin(run, accelerator), size, measured, planned, task_seconds)
    path = find_path(found.origin)
    found.write(path)
    print(f"The seconds of {len(measured) - 1} layers and the loss, with micro-batches of {size}, are in {path}.")
