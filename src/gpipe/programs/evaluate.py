"""A trained model's figures on an evaluation set: `train.py evaluate=<run or checkpoint>`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from gpipe.config import RunConfig
from gpipe.config.evaluated import to_evaluated
from gpipe.launch import garbage_collection, processes
from gpipe.launch.devices import check_devices
from gpipe.launch.errors import report_errors
from gpipe.launch.processes import Place
from gpipe.programs.train import describe_processes


def launch_evaluation(composed: DictConfig, folder: Path, overrides: Sequence[str]) -> None:
    """Start the processes that evaluate; print an error as one message and exit with status 1.

    Args:
        composed: the settings, `evaluate` among them.
        folder: for the processes; it is empty afterwards.
        overrides: the words of the command line.
    """
    with report_errors(debug=composed.launch.debug):
        from gpipe.checkpoint.manifest import Manifest
        from gpipe.data import check_data
        from gpipe.programs.build import find_checkpoint

        path = find_checkpoint("evaluate", composed.evaluate)
        run = to_evaluated(composed, Manifest.read(path).config, overrides)
        check_data(run.data.name, run.data.root)
        launch = run.launch
        check_devices(launch.num_processes, launch.device.value, launch.num_threads, launch.pin_cores)
    processes.run(evaluate_in_process, describe_processes(run, folder), run, path)


def evaluate_in_process(place: Place, _: Path, run: RunConfig, checkpoint: Path) -> None:
    """Build the run's part of this process and evaluate it; the first process prints."""
    from gpipe.programs import build

    garbage_collection.resume()
    layers = build.build_layers(run)
    partitions, _planner = build.share_partitions(run, layers, place)
    pipeline = build.build_pipeline(run, layers, partitions, place)
    manifest, evaluation = build.evaluate_checkpoint(run, pipeline, place, checkpoint)
    if place.is_main:
        print(f"{checkpoint}: {run.name} after {manifest.position.step} steps, on {run.data.name}")
        for name, figures in evaluation.items():
            print(f"  {name}: " + "  ".join(f"{figure} {value:.4f}" for figure, value in figures.items()))
    pipeline.close()
