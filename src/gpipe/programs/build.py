"""Settings -> objects. Nothing else knows both; below this nobody sees a config."""

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpipe.checkpoint.read import read_shapes
from gpipe.config import (
    AmoebaNetConfig,
    Autocast,
    ConfigError,
    Decay,
    Device,
    OptimizerConfig,
    PartitionBy,
    RematerializeChoice,
    RunConfig,
    to_plain,
)
from gpipe.launch import stops
from gpipe.launch.processes import Place
from gpipe.models import count_auxiliary_parameters, set_drop_path
from gpipe.pipeline.engine import Pipeline
from gpipe.pipeline.gradient_scaler import GradientScaler
from gpipe.pipeline.microbatch import Payload, microbatch_sizes
from gpipe.pipeline.schedule import SPLIT_SCHEDULES, Rematerialization, Rematerialize
from gpipe.pipeline.schedule_choice import place_stages
from gpipe.pipeline.shared.sharded_optimizer import ShardedOptimizer
from gpipe.pipeline.timeline import Timeline
from gpipe.planning.accelerator import EFFICIENCY, Accelerator, LayerSeconds, Speed, detect_accelerator
from gpipe.planning.calibration import Calibration
from gpipe.planning.cut import Cutter
from gpipe.planning.evaluation import EvaluationPlanner
from gpipe.planning.fit import Fit
from gpipe.planning.operation_memory import OperationMemory
from gpipe.planning.optimizer_memory import try_optimizer
from gpipe.planning.planner import Planner
from gpipe.planning.profile import LayerProfile, profile_layers
from gpipe.planning.step import Setting
from gpipe.planning.timing import LayerTimer, LayerTiming
from gpipe.programs.calibration_files import find_calibration
from gpipe.programs.chosen_checkpoint import choose_checkpoint, find_kindred, newest_manifest, refuse_other_files
from gpipe.programs.precision import precision_of, settle_precision
from gpipe.programs.workloads import Workload, workload_of
from gpipe.records import git_state, package_versions
from gpipe.training.ema import Ema
from gpipe.training.learning_rate import build_schedule
from gpipe.training.loader import RepeatedLoader
from gpipe.training.numerics import set_numerics
from gpipe.training.optimizers import build_optimizer
from gpipe.training.progress import Progress
from gpipe.training.tracking import Tracker
from gpipe.training.trainer import Trainer

_TIMED_RUNS = 5  # of each layer that count
_NAME_LENGTH = 64  # of a run, where it is mirrored
_NOT_IN_NAMES = ("experiment", "hydra", "launch", "name", "reproduction", "tracking")


def check_model(run: RunConfig) -> None:
    """Refuse, before processes start, a model of another library that it does not make, or that takes no such data.

    Raises:
        ConfigError: it is so.
    """
    workload_of(run).check()


def build_layers(run: RunConfig) -> nn.Sequential:
    """Describe the whole model; where it can be, on the meta device, where the pipeline fills its own layers."""
    return workload_of(run).layers()


@dataclass(frozen=True)
class Layout:
    """How the first process of a run has cut the model, for all.

    Attributes:
        partitions: the number of layers of each stage.
        rematerialize: a mode, or how many graphs each stage keeps at once.
        planner: what has chosen them; the first process's alone.
    """

    partitions: list[int]
    rematerialize: Rematerialization
    planner: Planner | None


def share_layout(run: RunConfig, layers: nn.Sequential, place: Place) -> Layout:
    """Choose the partitions and what is recomputed in the first process, and tell the others.

    Two measurements never agree, and hosts may have different GPUs: processes that choose alone would never meet.

    Raises:
        ValueError: the layers cannot be cut as the settings say.
    """
    planner: Planner | None = None
    chooses = run.pipeline.partitions is None
    measures = chooses and run.pipeline.partition_by is PartitionBy.measured_seconds
    memory = OperationMemory() if chooses and run.pipeline.partition_by is PartitionBy.measured_memory else None
    if memory is not None and place.device_type != "cpu":
        raise ConfigError(
            f"pipeline.partition_by is measured_memory, but stages are on {place.device_type}, and only the memory of "
            "processors is measured: set pipeline.partition_by=memory."
        )

    def decide(tell: Callable[[str], None]) -> None:
        nonlocal planner
        accelerator = detect_accelerator(place.device_type)
        seconds = None
        if measures:
            splits = run.pipeline.schedule.value in SPLIT_SCHEDULES
            seconds = measure_seconds(run, layers, place.device_type, lambda _: tell(""), splits=splits)
        calibration = None if measures else find_calibration(run, accelerator)
        planner = build_planner(run, accelerator, seconds=seconds, memory=memory, calibration=calibration)
        plan = planner.plan(build_setting(run, accelerator, place))
        tell(json.dumps([plan.partitions, plan.setting.rematerialize]))

    num_messages = 1 + (len(layers) if measures else 0)  # the others wait for each as long as for any message
    partitions, mode = json.loads(place.share_each("layout", num_messages, decide)[-1])
    return Layout(partitions, tuple(mode) if isinstance(mode, list) else Rematerialize(mode), planner)


def measure_seconds(
    run: RunConfig,
    layers: nn.Sequential,
    device_type: str,
    on_layer: Callable[[LayerTiming], None],
    *,
    splits: bool,
) -> list[LayerSeconds]:
    """Time each layer, described on the meta device, and the loss with the run's largest micro-batch."""
    workload = workload_of(run)
    size = max(microbatch_sizes(workload.num_examples // run.launch.num_replicas, run.pipeline.num_microbatches))
    device = torch.empty(0, device=device_type).device
    example = _zeros(workload.inputs(size), device), _zeros(workload.targets(size), device)
    settled = settle_precision(run, detect_accelerator(device_type))
    with build_autocast(settled.trainer.autocast, device_type)():
        timings = LayerTimer(device, _TIMED_RUNS, splits=splits).time(layers, workload.loss(), example, on_layer)
    return [timing.seconds for timing in timings]


def _zeros(value: Any, device: torch.device) -> Any:
    payload = Payload.of(value)
    payload.tensors = [torch.zeros_like(tensor, device=device) for tensor in payload.tensors]
    return payload.value()


def accelerator_at_hand(run: RunConfig) -> Accelerator:
    """Return what a run on this machine would compute with."""
    has_gpu = run.launch.device is not Device.cpu and torch.cuda.is_available()
    return detect_accelerator("cuda" if has_gpu else "cpu")


def build_setting(run: RunConfig, accelerator: Accelerator, place: Place | None = None) -> Setting:
    """Return how the run's model is run, for planning; `place` knows better than the settings what was launched."""
    settings = run.pipeline
    if settings.rematerialize is RematerializeChoice.fit:
        mode: Rematerialization | Fit = Fit(settings.memory_limit_bytes or accelerator.room_bytes)
    else:
        mode = Rematerialize(settings.rematerialize.value)
    rate = run.optimizer.learning_rate
    memory = try_optimizer(partial(_build_optimizer, run.optimizer, rate=rate, on_gpus=accelerator.is_gpu))
    return Setting(
        num_stages=settings.num_stages,
        num_microbatches=settings.num_microbatches,
        rematerialize=mode,
        schedule=settings.schedule.value,
        stages_per_device=settings.stages_per_device,
        state_ratio=(run.ema.decay is not None) + (0 if run.launch.shard_optimizer else memory.kept),
        shared_ratio=memory.kept if run.launch.shard_optimizer else 0,
        update_ratio=memory.update,
        num_replicas=run.launch.num_replicas,
        synchronize_batch_norm=settings.synchronize_batch_norm,
        is_sequential=run.launch.num_processes == 1 if place is None else place.mesh is None,
    )


def build_planner(
    run: RunConfig,
    accelerator: Accelerator,
    *,
    efficiency: float = EFFICIENCY,
    seconds: Sequence[LayerSeconds] | None = None,
    memory: OperationMemory | None = None,
    calibration: Calibration | None = None,
) -> Planner:
    """Build what plans the run's steps on accelerators of one kind.

    Args:
        run: the settings.
        accelerator: the kind.
        efficiency: the share of the makers' peaks that is reached.
        seconds: of each layer and the loss, measured with the run's largest micro-batch; None plans them.
        memory: measures operations; None plans without.
        calibration: corrects planned seconds; None takes them as they are.
    """
    run = settle_precision(run, accelerator)
    settings = run.pipeline
    partition_by = settings.partition_by.value.removeprefix("measured_")
    is_measured = partition_by != settings.partition_by.value
    if is_measured and settings.partitions is None and seconds is None and memory is None:
        raise ConfigError(
            f"pipeline.partition_by is {settings.partition_by.value}, but a plan measures nothing: set "
            f"pipeline.partition_by={partition_by}."
        )
    speed = Speed.of(accelerator, precision_of(run), efficiency)
    measured: Callable[[Sequence[LayerProfile]], Sequence[LayerSeconds]] | None = None
    if seconds is not None:
        measured = partial(_take, seconds)
    elif calibration is not None:
        # Its figures are shares of what this speed plans.
        measured = partial(_correct, calibration, Speed.of(accelerator, precision_of(run)))
    cut = Cutter(
        partition_by,
        settings.objective.value,
        speed,
        measured,
        settings.memory_limit_bytes,
        settings.partitions,
    )
    return Planner(
        _profiler(run, memory),
        cut,
        workload_of(run).num_examples,
        accelerator,
        speed,
        count_auxiliary_parameters(build_layers(run)),
        run.model.min_microbatch_size if isinstance(run.model, AmoebaNetConfig) else 1,
        measured,
        _evaluation_planner(run),
    )


def _take(seconds: Sequence[LayerSeconds], _: Sequence[LayerProfile]) -> Sequence[LayerSeconds]:
    return seconds


def _correct(calibration: Calibration, speed: Speed, profiles: Sequence[LayerProfile]) -> Sequence[LayerSeconds]:
    return calibration.correct(speed.seconds(profiles))


def profile_run(run: RunConfig, size: int) -> list[LayerProfile]:
    """Describe the run's layers and the loss with a micro-batch of a size."""
    return _profiler(run, None)(size)


def _profiler(run: RunConfig, memory: OperationMemory | None) -> Callable[[int], list[LayerProfile]]:
    """Return what describes the run's layers with a micro-batch of a given size."""
    workload = workload_of(run)
    layers, loss = workload.layers(), workload.loss()
    autocast = build_autocast(run.trainer.autocast, "cpu")

    def profile(size: int) -> list[LayerProfile]:
        example = workload.inputs(size), workload.targets(size)
        return profile_layers(layers, loss, example, autocast=autocast, measured=memory)

    return profile


def _evaluation_planner(run: RunConfig) -> EvaluationPlanner | None:
    settings, workload = run.trainer.evaluation, workload_of(run)
    if settings.every_epochs is None and settings.every_steps is None:
        return None
    layers, measure = workload.layers(), workload.make_metrics().measure
    autocast = build_autocast(settings.autocast, "cpu")

    def profile(size: int) -> list[LayerProfile]:
        example = workload.inputs(size), workload.evaluated_targets(size)
        return profile_layers(layers, measure, example, autocast=autocast, training=False)

    return EvaluationPlanner(profile, workload.num_evaluated_examples)


def build_pipeline(run: RunConfig, layers: nn.Sequential, layout: Layout, place: Place) -> Pipeline:
    """Build this process's part of the pipeline, with its weights in the settings' memory format."""
    precision, workload = run.trainer.float32_matmul_precision, workload_of(run)
    set_numerics(
        deterministic=bool(run.trainer.deterministic),
        float32_matmul_precision="highest" if precision is None else precision.value,
        tries_kernels=not workload.varies_in_length,
    )
    pipeline = Pipeline(
        layers,
        workload.loss(),
        layout.partitions,
        run.pipeline.num_microbatches,
        rematerialize=layout.rematerialize,
        schedule=run.pipeline.schedule.value,
        stages_per_device=run.pipeline.stages_per_device,
        devices=place.devices(
            place_stages(run.pipeline.schedule.value, run.pipeline.num_stages, run.pipeline.stages_per_device)
        ),
        mesh=place.mesh,
        seed=run.seed,
        loss_weight=workload.loss_weight,
        prepare_inputs=workload.prepare_inputs,
        timeout_seconds=run.pipeline.timeout_seconds,
        synchronize_batch_norm=run.pipeline.synchronize_batch_norm,
        check_recomputation=bool(run.pipeline.check_recomputation),
    )
    if settle_precision(run, detect_accelerator(place.device_type)).trainer.channels_last:
        pipeline.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # the stub lacks it
    if run.trainer.compile:
        if workload.final_drop_path:
            set_drop_path(pipeline.layers, workload.final_drop_path)  # masks from the first step on: one variant less
        # Layers for sentences are compiled for any length, once there is a second one; inductor fails on AmoebaNet's
        # cells for images of any number.
        dynamic = None if workload.varies_in_length else False
        pipeline.compile(partial(stops.find_reason, run.trainer.max_hours), dynamic=dynamic)
    return pipeline


def build_tracker(run: RunConfig, folder: Path, overrides: Sequence[str], *, enabled: bool) -> Tracker:
    """Open the run's log in its folder; only one process of a run enables it.

    The run is called after its overrides, and stands in a group with the others of its experiment. Where the log is
    mirrored, the settings there have the command, the commit and the versions too.
    """
    goes_on_from = None
    if run.trainer.resume_from is not None:
        goes_on_from = choose_checkpoint("trainer.resume_from", run.trainer.resume_from).parent.parent
    return Tracker(
        folder,
        enabled=enabled,
        mode=run.tracking.mode.value,
        project=run.tracking.project,
        group=run.name,
        name=_shorten(overrides) or run.name,
        tags=[
            run.model.family,
            run.data.name,
            f"K={run.pipeline.num_stages}",
            f"M={run.pipeline.num_microbatches}",
        ],
        config={**to_plain(run), **_describe_origin(overrides)} if enabled else {},
        resumed=goes_on_from,
    )


def _shorten(overrides: Sequence[str]) -> str:
    """Return what distinguishes a run from the others of its experiment, on at most 64 characters."""
    pairs = [item.lstrip("+~").partition("=") for item in overrides if "=" in item]
    said = [(key, value) for key, _, value in pairs if key.partition(".")[0] not in _NOT_IN_NAMES]
    words = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in said)
    return words if len(words) <= _NAME_LENGTH else words[: _NAME_LENGTH - 3] + "..."


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
    """Build the data, the optimiser and the loop around a pipeline, and go back to a checkpoint.

    That is the newest one in the run's own folder, else the one that the settings name, if they do.
    folder: the run's. on_timeline: takes each recorded timeline, on every process.
    """
    settings, workload = run.trainer, workload_of(run)
    train_loader, evaluation_loaders = workload.loaders(pipeline, pin_memory=place.device_type == "cuda")
    if settings.overfit_batches is not None:
        train_loader = RepeatedLoader(train_loader, settings.overfit_batches)
    statistics_loader = None
    if workload.has_batch_norm and settings.evaluation.statistics_batches is not None:
        # A loader of its own: training is in the midst of an epoch of the other.
        statistics_loader, _ = workload.loaders(pipeline, pin_memory=place.device_type == "cuda")
    num_steps = min(settings.num_epochs * len(train_loader), settings.max_steps or sys.maxsize)
    rate = run.optimizer.learning_rate * (settings.batch_size if run.optimizer.times_batch_size else 1)
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
    workload.keep(folder if place.is_main else None)
    optimizer = _build_optimizer(run.optimizer, pipeline.named_parameters(), rate)
    if run.launch.shard_optimizer and pipeline.job.num_replicas > 1:
        optimizer = ShardedOptimizer(optimizer, pipeline.job)
    # Checkpoints keep what was asked for.
    settled = settle_precision(run, detect_accelerator(place.device_type)).trainer
    trainer = Trainer(
        pipeline=pipeline,
        optimizer=optimizer,
        learning_rate=build_schedule(
            run.schedule.name.value,
            rate,
            steps_per_epoch=len(train_loader),
            num_steps=num_steps,
            warm_up_epochs=run.schedule.warm_up_epochs,
            warm_up_steps=run.schedule.warm_up_steps,
            decay_rate=run.schedule.decay_rate,
            decay_epochs=run.schedule.decay_epochs,
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
        profile_step=settings.profile_step,
        profile_file=folder / f"profile_{place.rank}.json",
        metrics=workload.make_metrics(),
        patience=settings.evaluation.patience,
        num_untimed_steps=settings.num_untimed_steps,
        evaluate_every_epochs=settings.evaluation.every_epochs,
        evaluate_every_steps=settings.evaluation.every_steps,
        checkpoint_folder=None if settings.checkpoints.keep is None else folder / "checkpoints",
        save_every_steps=settings.checkpoints.every_steps,
        keep_checkpoints=settings.checkpoints.keep or 1,
        timeline_every_steps=settings.timeline_every_steps,
        on_timeline=on_timeline,
        non_finite=settings.non_finite.action.value,
        max_skipped_steps=settings.non_finite.max_skipped_steps,
        asked_to_stop=partial(stops.find_reason, settings.max_hours),
        config={**to_plain(run), **kept, **_model_names(workload)},
    )
    if trainer.resume():
        progress.message(f"going on after step {pipeline.step}")
        return trainer
    if settings.resume_from is not None:
        trainer.resume(find_kindred("trainer.resume_from", settings.resume_from, kept))
        return trainer
    tracker.rewind(0)  # what an earlier session did before it saved anything is done again
    if run.init_from is not None:
        start = find_kindred("init_from", run.init_from, kept)
        trainer.start_from(start, workload.replaced(pipeline.layers, read_shapes(start)))
    return trainer


def _model_names(workload: Workload) -> dict[str, Any]:
    return {} if workload.model_names is None else {"model_names": dict(workload.model_names)}


def _check_warm_up(run: RunConfig, steps_per_epoch: int, num_steps: int) -> list[str]:
    """Return a warning where training ends within the warm-up.

    Raises:
        ConfigError: only num_epochs makes it so.
    """
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


def _build_optimizer(
    settings: OptimizerConfig, parameters: Iterable[tuple[str, nn.Parameter]], rate: float, on_gpus: bool | None = None
) -> torch.optim.Optimizer:
    handled_elsewhere = ("name", "learning_rate", "times_batch_size", "clip_norm")
    own = {name: value for name, value in asdict(settings).items() if name not in handled_elsewhere}
    return build_optimizer(settings.name, parameters, rate, on_gpus=on_gpus, **own)


def build_autocast(precision: Autocast, device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes the context of forward passes in a precision, once it is settled."""
    assert precision is not Autocast.auto
    if precision is Autocast.none:
        return nullcontext
    return partial(torch.autocast, device_type, getattr(torch, precision.value))
