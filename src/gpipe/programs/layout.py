"""Plan how a run's model is divided over its stages, and share the plan with all processes."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gpipe.config import (
    AmoebaNetConfig,
    ConfigError,
    Device,
    PartitionBy,
    RematerializeChoice,
    RunConfig,
    to_plain,
)
from gpipe.launch.processes import Place
from gpipe.models import count_auxiliary_parameters
from gpipe.pipeline.microbatch import Payload, microbatch_sizes
from gpipe.pipeline.schedule import Rematerialization, Rematerialize
from gpipe.pipeline.schedules.choice import SPLIT_SCHEDULES
from gpipe.planning.accelerator import EFFICIENCY, Accelerator, LayerSeconds, Speed, detect_accelerator
from gpipe.planning.calibration import Calibration
from gpipe.planning.cut import Cutter
from gpipe.planning.evaluation import EvaluationPlanner
from gpipe.planning.fit import Fit
from gpipe.planning.interpolation import KnownProfiles, Profiler
from gpipe.planning.operation_memory import OperationMemory
from gpipe.planning.optimizer_memory import try_optimizer
from gpipe.planning.planner import Planner
from gpipe.planning.profile import LayerProfile, profile_layers
from gpipe.planning.step import Plan, Setting
from gpipe.planning.timing import LayerTimer, LayerTiming
from gpipe.programs.calibration_files import find_calibration
from gpipe.programs.precision import (
    build_autocast,
    choose_kernels,
    compile_options_of,
    precision_of,
    settle_precision,
)
from gpipe.programs.workloads import workload_of
from gpipe.training.optimizers import build_optimizer

_TIMED_RUNS = 5  # per layer, after the warm-up
_ELSEWHERE = ("pipeline", "launch")  # settings of where layers run, not of what they are
_known: dict[tuple[str, str], KnownProfiles] = {}  # in this process: pipeline=auto plans its choice a second time


@dataclass(frozen=True)
class Layout:
    """How the first process of a run has cut the model, for all processes.

    Attributes:
        partitions: the number of layers of each stage.
        rematerialize: a mode, or the number of graphs that each stage keeps at once.
        planned: the planner and the plan behind these choices; None except in the first process.
    """

    partitions: list[int]
    rematerialize: Rematerialization
    planned: tuple[Planner, Plan] | None


def share_layout(run: RunConfig, layers: nn.Sequential, place: Place) -> Layout:
    """In the first process, choose the partitions and what is recomputed, and send the choice to the others.

    Measurements vary, and hosts may have different GPUs, so processes that chose for themselves would not agree.

    Raises:
        ValueError: the layers cannot be cut as the settings say.
    """
    planned: tuple[Planner, Plan] | None = None
    chooses = run.pipeline.partitions is None
    measures = chooses and run.pipeline.partition_by is PartitionBy.measured_seconds
    memory = OperationMemory() if chooses and run.pipeline.partition_by is PartitionBy.measured_memory else None
    if memory is not None and place.device_type != "cpu":
        raise ConfigError(
            f"pipeline.partition_by is measured_memory, but stages are on {place.device_type}, and memory is "
            "measured on CPUs only: set pipeline.partition_by=memory."
        )

    def decide(tell: Callable[[str], None]) -> None:
        nonlocal planned
        accelerator = detect_accelerator(place.device_type)
        seconds = None
        if measures:
            splits = run.pipeline.schedule.value in SPLIT_SCHEDULES
            seconds = measure_seconds(run, layers, place.device_type, lambda _: tell(""), splits=splits)
        calibration = None if measures else find_calibration(run, accelerator)
        planner = build_planner(run, accelerator, seconds=seconds, memory=memory, calibration=calibration)
        plan = planner.plan(build_setting(run, accelerator, place))
        planned = planner, plan
        tell(json.dumps([plan.partitions, plan.setting.rematerialize]))

    num_messages = 1 + (len(layers) if measures else 0)  # each one restarts the others' time-out
    partitions, mode = json.loads(place.share_each("layout", num_messages, decide)[-1])
    return Layout(partitions, tuple(mode) if isinstance(mode, list) else Rematerialize(mode), planned)


def measure_seconds(
    run: RunConfig,
    layers: nn.Sequential,
    device_type: str,
    on_layer: Callable[[LayerTiming], None],
    *,
    splits: bool,
) -> list[LayerSeconds]:
    """Time each layer, described on the meta device, and the loss with the run's largest micro-batch and kernels."""
    choose_kernels(run)
    workload = workload_of(run)
    size = max(microbatch_sizes(workload.num_examples // run.launch.num_replicas, run.pipeline.num_microbatches))
    device = torch.empty(0, device=device_type).device
    example = _zeros(workload.inputs(size), device), _zeros(workload.targets(size), device)
    settled = settle_precision(run, detect_accelerator(device_type)).trainer
    memory_format = torch.channels_last if settled.channels_last else torch.preserve_format
    with build_autocast(settled.autocast, device_type)():
        timer = LayerTimer(
            device, _TIMED_RUNS, splits=splits, memory_format=memory_format, compile_options=compile_options_of(run)
        )
        timings = timer.time(layers, workload.loss(), example, on_layer)
    return [timing.seconds for timing in timings]


def _zeros(value: Any, device: torch.device) -> Any:
    payload = Payload.of(value)
    payload.tensors = [torch.zeros_like(tensor, device=device) for tensor in payload.tensors]
    return payload.value()


def accelerator_at_hand(run: RunConfig) -> Accelerator:
    """Return the kind of device that a run on this machine would use."""
    has_gpu = run.launch.device is not Device.cpu and torch.cuda.is_available()
    if run.launch.device is Device.cuda and not has_gpu:
        raise ConfigError(
            "launch.device is cuda, but torch finds no GPU here: plan for one with plan.py device=<its name>, or set "
            "launch.device=cpu."
        )
    return detect_accelerator("cuda" if has_gpu else "cpu")


def build_setting(run: RunConfig, accelerator: Accelerator, place: Place | None = None) -> Setting:
    """Return the planner's description of a run; `place` overrides the settings on whether processes were launched."""
    settings = run.pipeline
    if settings.rematerialize is RematerializeChoice.fit:
        mode: Rematerialization | Fit = Fit(settings.memory_limit_bytes or accelerator.room_bytes)
    else:
        mode = Rematerialize(settings.rematerialize.value)
    optimizer = run.optimizer
    options: dict[str, Any] = {"lr": optimizer.learning_rate, "on_gpus": accelerator.is_gpu, **optimizer.arguments}
    memory = try_optimizer(partial(build_optimizer, optimizer.name, **options))
    return Setting(
        num_stages=settings.num_stages,
        num_microbatches=settings.num_microbatches,
        rematerialize=mode,
        schedule=settings.schedule.value,
        stages_per_device=settings.stages_per_device,
        state_ratio=(run.ema.decay is not None) + (0 if run.launch.shard_optimizer else memory.kept),
        shared_ratio=memory.kept if run.launch.shard_optimizer else None,
        update_ratio=memory.update,
        largest_update_ratio=memory.largest,
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
    """Build the planner of a run's steps on accelerators of one kind.

    `efficiency` is the share of the maker's peak speeds that real work reaches. `seconds` are measured ones of each
    layer and the loss with the run's largest micro-batch; without them, seconds are planned, and `calibration` corrects
    them and those per task. `memory` measures the memory of operations.
    """
    run = settle_precision(run, accelerator)
    settings = run.pipeline
    workload = workload_of(run)
    if settings.num_stages > (num_layers := len(workload.layers())):
        raise ConfigError(
            f"pipeline.num_stages is {settings.num_stages}, but the model has {num_layers} layers: set it to "
            f"{num_layers} or less."
        )
    if settings.partitions is not None and sum(settings.partitions) != num_layers:
        raise ConfigError(
            f"pipeline.partitions is {settings.partitions}, expected numbers whose sum is the model's {num_layers} "
            "layers: correct them, or set it to null."
        )
    if settings.synchronize_batch_norm and not workload.has_batch_norm:
        raise ConfigError(
            "pipeline.synchronize_batch_norm is true, expected false with this model, which has no batch norm: set "
            "pipeline.synchronize_batch_norm=false."
        )
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
        measured = lambda _: seconds  # noqa: E731 - the cutter and the planner share it
    elif calibration is not None:
        usual = Speed.of(accelerator, precision_of(run))  # to which its figures are relative
        measured = lambda profiles: calibration.correct(usual.seconds(profiles))  # noqa: E731
        speed = replace(speed, task_seconds=calibration.task_seconds)
    objective, limit = settings.objective.value, settings.memory_limit_bytes
    evaluation = run.trainer.evaluation
    is_evaluated = (evaluation.every_epochs, evaluation.every_steps) != (None, None)
    return Planner(
        training_profiler(run, memory),
        Cutter(partition_by, objective, speed, measured, limit, settings.partitions),
        workload.num_examples,
        accelerator,
        speed,
        count_auxiliary_parameters(workload.layers()),
        run.model.min_microbatch_size if isinstance(run.model, AmoebaNetConfig) else 1,
        measured,
        EvaluationPlanner(evaluation_profiler(run), workload.num_evaluated_examples) if is_evaluated else None,
        workload.varies_in_length,
    )


def training_profiler(run: RunConfig, measured: OperationMemory | None = None) -> Profiler:
    """Return a function that describes the layers and the loss in training with a micro-batch of a given size.

    The run's precision must be settled. `measured` runs operations at each call, to measure their memory.
    """
    workload = workload_of(run)
    autocast = build_autocast(run.trainer.autocast, "cpu")

    def describe(size: int) -> list[LayerProfile]:
        example = workload.inputs(size), workload.targets(size)
        return profile_layers(workload.layers(), workload.loss(), example, autocast=autocast, measured=measured)

    return describe if measured is not None else _remember(run, "training", describe)


def evaluation_profiler(run: RunConfig) -> Profiler:
    """Return a function that describes the layers and the metrics in evaluation with a micro-batch of a given size."""
    workload = workload_of(run)
    measure = workload.make_metrics().measure
    autocast = build_autocast(run.trainer.evaluation.autocast, "cpu")

    def describe(size: int) -> list[LayerProfile]:
        example = workload.inputs(size), workload.evaluated_targets(size)
        return profile_layers(workload.layers(), measure, example, autocast=autocast, training=False)

    return _remember(run, "evaluation", describe)


def _remember(run: RunConfig, purpose: str, describe: Profiler) -> Profiler:
    settings = {key: value for key, value in to_plain(run).items() if key not in _ELSEWHERE}
    return _known.setdefault((purpose, json.dumps(settings, sort_keys=True)), KnownProfiles(describe))
