"""Build layers, pipeline, tracker and trainer from settings. No code below the programs sees a config."""

import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpipe.checkpoint.manifest import Manifest
from gpipe.checkpoint.read import read_shapes
from gpipe.config import Autocast, ConfigError, Decay, RunConfig, to_plain
from gpipe.data.images.loader import ImageLoader
from gpipe.launch import stops
from gpipe.launch.processes import Place
from gpipe.models import set_drop_path
from gpipe.pipeline.engine import Pipeline
from gpipe.pipeline.schedules.choice import place_stages
from gpipe.pipeline.shared.sharded_optimizer import ShardedOptimizer
from gpipe.pipeline.step_end.gradient_scaler import GradientScaler
from gpipe.pipeline.timeline import Timeline
from gpipe.planning.accelerator import detect_accelerator
from gpipe.programs.chosen_checkpoint import (
    CLASS_NAMES,
    choose_checkpoint,
    find_kindred,
    newest_manifest,
    refuse_other_files,
    refuse_other_labels,
)
from gpipe.programs.layout import Layout
from gpipe.programs.precision import build_autocast, choose_kernels, compile_options_of, settle_precision
from gpipe.programs.workloads import Workload, workload_of
from gpipe.records import git_state, package_versions
from gpipe.training.ema import Ema
from gpipe.training.learning_rate import build_schedule
from gpipe.training.loader import RepeatedLoader
from gpipe.training.optimizers import build_optimizer
from gpipe.training.progress import Progress
from gpipe.training.tracking import Tracker
from gpipe.training.trainer import Trainer

_NOT_IN_NAMES = ("experiment", "hydra", "launch", "name", "reproduction", "tracking")


def build_layers(run: RunConfig) -> nn.Sequential:
    """Describe the whole model, if possible on the meta device; the pipeline then fills its own layers."""
    return workload_of(run).layers()


def build_pipeline(run: RunConfig, layers: nn.Sequential, layout: Layout, place: Place) -> Pipeline:
    """Build this process's part of the pipeline, with its weights in the settings' memory format."""
    choose_kernels(run)
    workload, schedule = workload_of(run), run.pipeline.schedule.value
    pipeline = Pipeline(
        layers,
        workload.loss(),
        layout.partitions,
        run.pipeline.num_microbatches,
        rematerialize=layout.rematerialize,
        schedule=schedule,
        stages_per_device=run.pipeline.stages_per_device,
        devices=place.devices(place_stages(schedule, run.pipeline.num_stages, run.pipeline.stages_per_device)),
        mesh=place.mesh,
        seed=workload.model_seed,
        loss_weight=workload.loss_weight,
        prepare_inputs=workload.prepare_inputs,
        timeout_seconds=run.pipeline.timeout_seconds,
        synchronize_batch_norm=run.pipeline.synchronize_batch_norm,
        check_recomputation=bool(run.pipeline.check_recomputation),
    )
    if settle_precision(run, detect_accelerator(place.device_type)).trainer.channels_last:
        pipeline.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # the stub lacks it
    if (options := compile_options_of(run)) is not None:
        if workload.final_drop_path:  # masks from the first step on: one variant fewer to compile
            set_drop_path(pipeline.layers, workload.final_drop_path)
        pipeline.compile(partial(stops.find_reason, run.trainer.max_hours), **options)
    if run.trainer.cuda_graphs:
        pipeline.use_cuda_graphs()
    if run.launch.device_threads:
        pipeline.use_device_threads()
    return pipeline


def build_tracker(run: RunConfig, folder: Path, overrides: Sequence[str], *, enabled: bool) -> Tracker:
    """Open the run's log in its folder; only one process of a run enables it.

    The run is named after its overrides and grouped with the other runs of its experiment. Mirrors of the log also get
    the command, the commit and the versions.
    """
    goes_on_from = None
    if run.trainer.resume_from is not None:
        with suppress(ConfigError):  # it is gone, and this run resumes from a checkpoint of its own
            goes_on_from = choose_checkpoint("trainer.resume_from", run.trainer.resume_from).parent.parent
    return Tracker(
        folder,
        enabled=enabled,
        mode=run.tracking.mode.value,
        project=run.tracking.project,
        group=run.name,
        name=_shorten(overrides) or run.name,
        tags=[run.model.family, run.data.name, f"K={run.pipeline.num_stages}", f"M={run.pipeline.num_microbatches}"],
        config={**to_plain(run), **_describe_origin(overrides)} if enabled else {},
        resumed=goes_on_from,
    )


def _shorten(overrides: Sequence[str]) -> str:
    """Return what distinguishes a run from others of its experiment, in at most 64 characters."""
    pairs = [item.lstrip("+~").partition("=") for item in overrides if "=" in item]
    said = [(key, value) for key, _, value in pairs if key.partition(".")[0] not in _NOT_IN_NAMES]
    words = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in said)
    return words if len(words) <= 64 else f"{words[:61]}..."


def _describe_origin(overrides: Sequence[str]) -> dict[str, Any]:
    commit, is_dirty = git_state(Path(__file__).parent)
    return {
        "command": shlex.join(["python", "train.py", *overrides]),
        "commit": commit,
        "uncommitted_changes": is_dirty,
        "packages": package_versions(),
    }


def build_trainer(
    run: RunConfig,
    pipeline: Pipeline,
    place: Place,
    folder: Path,
    tracker: Tracker,
    on_timeline: Callable[[Timeline], None],
) -> Trainer:
    """Build the data, the optimiser and the training loop around a pipeline, and load a checkpoint if there is one.

    The newest checkpoint in the run's own folder comes first, then the one that the settings name. `on_timeline` gets
    each recorded timeline, on every process.
    """
    settings, workload = run.trainer, workload_of(run)
    pin_memory = place.device_type == "cuda"
    train_loader = workload.train_loader(pipeline, pin_memory=pin_memory)
    evaluation_loaders = workload.evaluation_loaders(pipeline, pin_memory=pin_memory)
    if settings.overfit_batches is not None:
        train_loader = RepeatedLoader(train_loader, settings.overfit_batches)
    statistics_loader = None
    if workload.has_batch_norm and settings.evaluation.statistics_batches is not None:
        # A separate loader, because training is in the middle of an epoch of the other one.
        statistics_loader = workload.train_loader(pipeline, pin_memory=pin_memory)
        if isinstance(statistics_loader, ImageLoader) and isinstance(train_loader, ImageLoader):
            statistics_loader.broken_images = train_loader.broken_images  # shared, so that each is reported once
    num_steps = min(settings.num_epochs * len(train_loader), settings.max_steps or sys.maxsize)
    rate = run.optimizer.learning_rate * (settings.batch_size if run.optimizer.times_batch_size else 1)
    if settings.profile_step is not None and settings.profile_step >= num_steps:
        raise ConfigError(
            f"trainer.profile_step is {settings.profile_step}, expected less than the {num_steps} steps of "
            "the training: lower it."
        )
    progress = Progress(
        num_steps,
        settings.num_epochs,
        enabled=place.is_main,
        under_way=(lambda: pipeline.job.compiling) if settings.compile else None,
    )
    for sentence in (*workload.warnings(), *_check_warm_up(run, len(train_loader), num_steps)):
        progress.message(f"warning: {sentence}")
    kept = workload.keep(None)
    if (earlier := newest_manifest(folder)) is not None:
        refuse_other_files(f"{folder} has a checkpoint", earlier.config, kept)
        refuse_other_labels(str(folder), earlier, workload.class_names)
    workload.keep(folder if place.is_main else None)
    optimizer = build_optimizer(run.optimizer.name, pipeline.named_parameters(), rate, **run.optimizer.arguments)
    if run.launch.shard_optimizer and pipeline.job.num_replicas > 1:
        optimizer = ShardedOptimizer(optimizer, pipeline.job)
    # Only what is built: checkpoints keep the settings as the user gave them.
    settled = settle_precision(run, detect_accelerator(place.device_type)).trainer
    trainer = Trainer(
        pipeline=pipeline,
        optimizer=optimizer,
        learning_rate=build_schedule(
            run.schedule.name.value,
            rate,
            steps_per_epoch=len(train_loader),
            num_steps=num_steps,
            **run.schedule.values_but("name"),
        ),
        train_loader=train_loader,
        evaluation_loaders=evaluation_loaders,
        num_epochs=settings.num_epochs,
        max_steps=settings.max_steps,
        tracker=tracker,
        progress=progress,
        seed=run.seed,
        ema=None if run.ema.decay is None else Ema(pipeline.layers, run.ema.decay, warm_up=run.ema.warm_up),
        max_gradient_norm=run.optimizer.clip_norm,
        autocast=build_autocast(settled.autocast, place.device_type),
        evaluation_autocast=build_autocast(settled.evaluation.autocast, place.device_type),
        scaler=GradientScaler() if settled.autocast is Autocast.float16 else None,
        set_drop_path=None if workload.final_drop_path is None else partial(set_drop_path, pipeline.layers),
        final_drop_path=workload.final_drop_path or 0.0,
        examples=workload.examples,
        count_targets=workload.loss_weight or len,  # an image is one target, mixed or not
        statistics_loader=statistics_loader,
        num_statistics_batches=settings.evaluation.statistics_batches,
        max_evaluation_batches=settings.evaluation.max_batches,
        evaluate_raw=settings.evaluation.raw is not False,
        profile_step=settings.profile_step,
        profile_file=folder / f"profile_{place.rank}.json",
        metrics=workload.make_metrics(),
        patience=settings.evaluation.patience,
        num_untimed_steps=settings.num_untimed_steps,
        evaluate_every_epochs=settings.evaluation.every_epochs,
        evaluate_every_steps=settings.evaluation.every_steps,
        checkpoint_folder=folder / "checkpoints",
        save_every_steps=settings.checkpoints.every_steps,
        keep_checkpoints=settings.checkpoints.keep,
        timeline_every_steps=settings.timeline_every_steps,
        on_timeline=on_timeline,
        non_finite=settings.non_finite.action.value,
        max_skipped_steps=settings.non_finite.max_skipped_steps,
        asked_to_stop=partial(stops.find_reason, settings.max_hours),
        config={**to_plain(run), **kept, **_collect_names(workload)},
    )
    if trainer.resume():
        progress.message(f"resuming after step {pipeline.step}")
        return trainer
    if settings.resume_from is not None:
        checkpoint = find_kindred("trainer.resume_from", settings.resume_from, kept)
        refuse_other_labels(settings.resume_from, Manifest.read(checkpoint), workload.class_names)
        trainer.resume(checkpoint)
        return trainer
    tracker.rewind(0)  # steps of an earlier session that saved nothing are repeated
    if run.init_from is not None:
        start = find_kindred("init_from", run.init_from, kept)
        progress.message(f"starting from the weights of {start}")
        replaced = workload.replaced(pipeline.layers, read_shapes(start))
        saved = {} if start.is_file() else Manifest.read(start).config  # an exported file has no settings
        was_fine_tuned = saved.get("init_from") is not None and saved.get("seed") == run.seed
        if any(pipeline.job.gather(bool(replaced))) and was_fine_tuned:
            progress.message(
                f"warning: {start} was fine-tuned with seed={run.seed} too, so this run begins with the softmax layer "
                "that its features were trained with: set another seed."
            )
        trainer.start_from(start, replaced)
    return trainer


def _collect_names(workload: Workload) -> dict[str, Any]:
    """Return the names that checkpoints store beside the settings."""
    model_names, class_names = workload.model_names, workload.class_names
    return ({} if model_names is None else {"model_names": dict(model_names)}) | (
        {} if class_names is None else {CLASS_NAMES: list(class_names)}
    )


def _check_warm_up(run: RunConfig, steps_per_epoch: int, num_steps: int) -> list[str]:
    """Return a warning if training ends within the warm-up."""
    schedule, trainer = run.schedule, run.trainer
    if schedule.warm_up_steps is not None:
        setting, warm_up_steps = f"schedule.warm_up_steps={schedule.warm_up_steps}", schedule.warm_up_steps
    else:
        setting = f"schedule.warm_up_epochs={schedule.warm_up_epochs:g}"
        warm_up_steps = round(schedule.warm_up_epochs * steps_per_epoch)
    if warm_up_steps <= num_steps:
        return []
    ends_early = num_steps < trainer.num_epochs * steps_per_epoch
    length = f"trainer.max_steps={trainer.max_steps}" if ends_early else f"trainer.num_epochs={trainer.num_epochs}"
    sentence = f"{setting} gives {warm_up_steps} warm-up steps, but training has {num_steps} ({length})"
    if schedule.name is Decay.cosine and not ends_early:
        raise ConfigError(f"{sentence}: lower it; 0 means none.")
    return [f"{sentence}, so the learning rate only rises."]
