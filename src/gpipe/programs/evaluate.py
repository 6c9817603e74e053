"""A trained model's figures on an evaluation set: `train.py evaluate=<run or checkpoint>`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from gpipe.config import ConfigError, RunConfig, to_plain
from gpipe.config.evaluated import to_evaluated
from gpipe.config.run import refuse_open
from gpipe.config.saved import from_plain
from gpipe.launch import garbage_collection, processes, stops
from gpipe.launch.devices import check_devices
from gpipe.launch.errors import report_errors
from gpipe.launch.processes import Place
from gpipe.programs.train import describe_processes
from gpipe.records import WHEREABOUTS, differences, same_settings

if TYPE_CHECKING:
    from torch import nn

    from gpipe.checkpoint.manifest import Manifest


def launch_evaluation(composed: DictConfig, folder: Path, overrides: Sequence[str]) -> None:
    """Start the processes that evaluate; print an error as one message and exit with status 1.

    `folder` is for the processes' use, and is empty afterwards.
    """
    with report_errors(debug=composed.launch.debug):
        refuse_open(composed)
        from gpipe.checkpoint.manifest import Manifest
        from gpipe.programs.chosen_checkpoint import choose_checkpoint
        from gpipe.programs.complete import check_run_data, without_fetching

        path = choose_checkpoint("evaluate", composed.evaluate)
        manifest = Manifest.read(path)
        run = without_fetching(to_evaluated(composed, manifest.config, overrides))
        check_run_data(run)
        if _wants_estimates(run, manifest) and not _has_training_data(run, manifest):
            found = differences({"data": manifest.config["data"]}, {"data": to_plain(run)["data"]}, WHEREABOUTS)
            raise ConfigError(
                f"trainer.evaluation.statistics_batches is {run.trainer.evaluation.statistics_batches}, but statistics "
                f"are estimated on the data of the training ({'; '.join(found)}): leave it out."
            )
        launch = run.launch
        check_devices(launch.num_processes, launch.device.value, launch.num_threads, launch.pin_cores)
    stops.listen().close()  # an evaluation saves nothing, so a signal ends it at once
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    processes.run(evaluate_in_process, describe_processes(run, folder), run, path)


def evaluate_in_process(place: Place, _: Path, run: RunConfig, checkpoint: Path) -> None:
    """Build this process's part of the run, load a checkpoint and evaluate it; the first process prints.

    Batch norms use the saved statistics if an evaluation had estimated them. Otherwise, or if the settings ask for
    another number of mini-batches, they are estimated here, as before an evaluation in training.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model.
        ConfigError: the model was trained with another tokenizer.
    """
    from gpipe.checkpoint.manifest import Manifest
    from gpipe.checkpoint.read import load_checkpoint
    from gpipe.checkpoint.stale_statistics import describe_stale_statistics
    from gpipe.planning.accelerator import detect_accelerator
    from gpipe.programs import build
    from gpipe.programs.chosen_checkpoint import describe_other_labels, refuse_other_files
    from gpipe.programs.layout import share_layout
    from gpipe.programs.precision import build_autocast, settle_precision
    from gpipe.programs.workloads import workload_of
    from gpipe.training.checkpoints import get_tensors
    from gpipe.training.ema import Ema
    from gpipe.training.evaluation import evaluate_on_all
    from gpipe.training.statistics import estimate_statistics

    garbage_collection.resume()
    run = settle_precision(run, detect_accelerator(place.device_type))
    workload, settings = workload_of(run), run.trainer.evaluation
    refuse_other_files(f"evaluate is {checkpoint}", Manifest.read(checkpoint).config, workload.keep(None))
    layers = build.build_layers(run)
    layout = share_layout(run, layers, place)
    pipeline = build.build_pipeline(run, layers, layout, place)
    del layers, layout  # frees the memory that other stages' layers may hold
    pin_memory = place.device_type == "cuda"
    loaders = workload.evaluation_loaders(pipeline, pin_memory=pin_memory)
    ema = None if run.ema.decay is None else Ema(pipeline.layers, run.ema.decay)
    manifest = load_checkpoint(checkpoint, pipeline, get_tensors(pipeline, ema))

    def estimate(own: nn.ModuleDict | None) -> None:
        is_due = wants_estimates or ("weights" if own is None else "ema") in stale
        if is_due and statistics_loader is not None and settings.statistics_batches is not None:
            with build_autocast(run.trainer.autocast, place.device_type)():
                estimate_statistics(pipeline, statistics_loader, settings.statistics_batches, own)

    statistics_loader = None
    kinds = ["weights"] if ema is None else ["ema"] if settings.raw is False else ["ema", "weights"]
    sentences = {kind: describe_stale_statistics(checkpoint, manifest, kind) for kind in kinds}
    stale = {kind: sentence for kind, sentence in sentences.items() if sentence is not None}
    wants_estimates = _wants_estimates(run, manifest) and workload.has_batch_norm
    if wants_estimates or stale:
        if settings.statistics_batches is not None and _has_training_data(run, manifest):
            statistics_loader = workload.train_loader(pipeline, pin_memory=pin_memory)
            statistics_loader.set_epoch(manifest.position.epoch)
        elif place.is_main:  # stale: estimates that the user asked for on other data were refused before
            print(f"warning: {next(iter(stale.values()))}", file=sys.stderr)
    other = describe_other_labels(str(checkpoint), manifest, workload.class_names)
    if place.is_main and other is not None:
        print(f"warning: {other}: labels are compared by their numbers", file=sys.stderr)
    evaluation = evaluate_on_all(
        pipeline,
        loaders,
        None if ema is None else ema.module,
        workload.make_metrics(),
        raw=settings.raw is not False,
        max_batches=settings.max_batches,
        autocast=build_autocast(settings.autocast, place.device_type),
        prepare=estimate,
    )
    if place.is_main:
        print(f"{checkpoint}: {run.name} after {manifest.position.step} steps, on {run.data.name}")
        for name, figures in evaluation.items():
            print(f"  {name}: " + "  ".join(f"{figure} {value:.4f}" for figure, value in figures.items()))
    for loader in loaders.values():
        loader.close()
    pipeline.close()


def _wants_estimates(run: RunConfig, manifest: Manifest) -> bool:
    """Return whether the settings ask for batch norm statistics of another number of mini-batches than in training."""
    trained = from_plain(manifest.config).trainer.evaluation.statistics_batches
    return run.trainer.evaluation.statistics_batches not in (None, trained)


def _has_training_data(run: RunConfig, manifest: Manifest) -> bool:
    trained = to_plain(from_plain(manifest.config))  # with null for settings that are newer than the checkpoint
    return same_settings({"data": to_plain(run)["data"]}, {"data": trained["data"]})
