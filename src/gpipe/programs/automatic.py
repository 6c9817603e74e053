"""pipeline=auto: the planner chooses the pipeline's settings that are left open."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from gpipe.config import ConfigError, ImagesConfig, RunConfig, to_plain, to_run
from gpipe.config.evaluated import find_said_keys
from gpipe.launch import stops
from gpipe.launch.devices import count_threads, own_cores
from gpipe.programs.complete import check_run_data, complete

if TYPE_CHECKING:
    from gpipe.planning.accelerator import Accelerator
    from gpipe.planning.planner import Planner
    from gpipe.planning.search import Space
    from gpipe.planning.step import Setting

# What may be open, with values for checking all other settings.
_OPEN: dict[str, Any] = {
    "num_stages": 1,
    "num_microbatches": 1,
    "schedule": "gpipe",
    "stages_per_device": 1,
    "rematerialize": "always",
}


def is_open(composed: DictConfig) -> bool:
    """Return whether the settings leave something of the pipeline to the planner."""
    return any(OmegaConf.is_missing(composed.pipeline, key) for key in _OPEN)


@dataclass(frozen=True)
class DevicesToUse:
    """The devices for which a pipeline is chosen.

    Attributes:
        accelerator: their kind.
        count: their number, over all replicas.
        room_bytes: the limit of each device's planned peak.
        efficiency: the share of its peak speeds that a device reaches.
    """

    accelerator: Accelerator
    count: int
    room_bytes: int
    efficiency: float


def choose_pipeline(
    composed: DictConfig,
    words: Sequence[str],
    find_devices: Callable[[RunConfig, int | None], DevicesToUse] | None = None,
) -> DictConfig:
    """Fill in the pipeline's settings with the shortest planned step; print the best choices.

    A number of replicas or processes is kept if the words of the command line set it; an experiment's is not.
    `find_devices` returns the devices for checked settings, and for the number of processes if the words set one. None
    finds those of this machine, and checks the run's data.

    Raises:
        ConfigError: a setting is wrong, or nothing fits.
        DataMissing: the data are missing.
    """
    known = {key: composed.pipeline[key] for key in _OPEN if not OmegaConf.is_missing(composed.pipeline, key)}
    said = dict(known)
    if composed.pipeline.partitions is not None:
        said["partitions"] = composed.pipeline.partitions
        known.setdefault("num_stages", len(composed.pipeline.partitions))
    named = {key for _, key in find_said_keys(words)}
    fixed = {key: composed.launch[key] for key in ("num_replicas", "num_processes") if f"launch.{key}" in named}
    run = to_run(_fill(composed, _OPEN | _find_shape(known) | known, num_replicas=1, num_processes=1))
    if find_devices is None and not run.trainer.dry_run:
        check_run_data(run)
    run = complete(run)

    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from gpipe.pipeline.batch_norm import converted_batch_norms
    from gpipe.planning.report import print_choices
    from gpipe.planning.search import Space, find_fastest
    from gpipe.programs.build import build_layers
    from gpipe.programs.calibration_files import find_calibration
    from gpipe.programs.layout import build_planner, build_setting

    devices = (find_devices or find_devices_at_hand)(run, fixed.get("num_processes"))
    run = replace(run, pipeline=replace(run.pipeline, memory_limit_bytes=devices.room_bytes))  # as `_fill` sets it
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", devices.count))
    threads = replace(run.launch, num_threads=count_threads(run.launch.num_threads, num_local))
    calibration = find_calibration(replace(run, launch=threads), devices.accelerator)
    planner = build_planner(run, devices.accelerator, efficiency=devices.efficiency, calibration=calibration)
    like = build_setting(run, devices.accelerator)
    in_pairs = isinstance(run.data, ImagesConfig) and run.data.mixes
    is_alone = run.trainer.cuda_graphs and run.pipeline.synchronize_batch_norm  # replicas would exchange statistics
    space = Space(
        devices.count,
        num_stages=known.get("num_stages"),
        num_microbatches=known.get("num_microbatches"),
        schedule=known["schedule"].value if "schedule" in known else None,
        stages_per_device=known.get("stages_per_device"),
        rematerialize=like.rematerialize if "rematerialize" in known else None,
        num_replicas=fixed.get("num_replicas", 1 if is_alone else None),
        divided=run.trainer.batch_size // (2 if in_pairs else 1),
    )
    is_first = os.environ.get("RANK", "0") == "0"

    def stop_if_asked() -> None:
        stops.exit_before_start(stops.find_reason(), speaks=is_first)

    title = f"comparing plans for {devices.count} x {devices.accelerator.name}"
    # A large model takes half a minute. Only a terminal shows this, and it is gone afterwards.
    columns = SpinnerColumn(), TextColumn(title), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not is_first) as progress:
        progress.add_task("")
        plans = find_fastest(planner, space, like, devices.room_bytes, on_plan=stop_if_asked)
    if not plans:
        words = [f"pipeline.{key}={getattr(value, 'name', value)}" for key, value in said.items()]
        words += [f"launch.{key}={value}" for key, value in fixed.items()]
        kept = f", with {', '.join(words)}" if words else ""
        raise ConfigError(f"pipeline is auto{kept}, but {_explain(run, planner, space, like, devices)}.")
    best = plans[0].setting
    if is_first:
        print_choices(plans, devices.accelerator, devices.count)
        if "num_microbatches" not in known and converted_batch_norms(build_layers(run)):
            num_seen = plans[0].microbatch_size * (best.num_replicas if best.synchronize_batch_norm else 1)
            print(
                f"Batch norm sees {num_seen} examples at once with the first of these, and other numbers with the "
                "others, so their training differs: set pipeline.num_microbatches and launch.num_replicas to compare "
                "runs."
            )
    values = {key: getattr(best, key) for key in ("num_stages", "num_microbatches", "schedule", "stages_per_device")}
    values["rematerialize"] = "fit" if isinstance(best.rematerialize, tuple) else str(best.rematerialize)
    values["memory_limit_bytes"] = devices.room_bytes
    return _fill(composed, values | known, num_replicas=best.num_replicas, num_processes=best.num_devices)


def _explain(run: RunConfig, planner: Planner, space: Space, like: Setting, devices: DevicesToUse) -> str:
    """Return why no setting of a space works, and what to change.

    The conditions are checked in order, from equal parts to memory; the first that no setting meets is the reason.

    Raises:
        ValueError: the settings cannot be planned for another reason.
    """
    from gpipe.planning.cut import NoCutFits
    from gpipe.planning.search import find_fastest
    from gpipe.programs.workloads import workload_of

    used = f"{devices.count} x {devices.accelerator.name}"
    whole = f"the {planner.batch_size} {workload_of(run).examples} of a planned mini-batch"
    settings = list(space.settings(planner.batch_size, like, devices.room_bytes))
    if not settings:
        if space.divided != planner.batch_size:
            whole = f"the {space.divided} {'tokens' if planner.varies_in_length else 'pairs of images'} of a mini-batch"
        return f"that does not divide {used}, and {whole}, into equal parts: change it, or leave it to the planner"
    settings = [setting for setting in settings if planner.find_microbatch_size(setting) is not None]
    if not settings:
        return (
            f"{whole} leave batch norm fewer than {planner.min_microbatch_size} at once: raise trainer.batch_size, or "
            "leave launch.num_replicas and pipeline.num_microbatches to the planner"
        )
    num_layers = len(workload_of(run).layers())
    if (num_stages := min(setting.num_stages for setting in settings)) > num_layers:
        return (
            f"{used} make {num_stages} stages or more, and the model has {num_layers} layers: use fewer devices, or a "
            "trainer.batch_size that more replicas divide"
        )
    with suppress(NoCutFits):
        planner.plan(next(setting for setting in settings if setting.num_stages <= num_layers))
    room = f"{used} with {devices.room_bytes / 2**30:.3g} GiB each"
    trains = replace(planner, evaluation=None)
    if planner.evaluation is not None and find_fastest(trains, space, like, devices.room_bytes, count=1):
        return f"no evaluation fits {room}: lower trainer.evaluation.batch_size, or use more devices"
    return f"nothing fits {room}: use more devices, or lower trainer.batch_size"


def find_devices_at_hand(run: RunConfig, count: int | None = None, efficiency: float | None = None) -> DevicesToUse:
    """Return the devices of this machine: torchrun's processes, or GPUs, or cores.

    `count` is the number to use, over all hosts, if not all; `efficiency` the share of their peak speeds.
    """
    from gpipe.planning.accelerator import EFFICIENCY
    from gpipe.programs.layout import accelerator_at_hand

    accelerator = accelerator_at_hand(run)
    count = count or _count_devices(run, accelerator.name)
    room = run.pipeline.memory_limit_bytes or accelerator.room_bytes
    if accelerator.name == "cpu" and run.pipeline.memory_limit_bytes is None:
        num_local = min(count, int(os.environ.get("LOCAL_WORLD_SIZE", count)))
        room = min(room, _host_bytes() * 9 // 10 // num_local)  # its processes share the host's memory
    return DevicesToUse(accelerator, count, room, efficiency or EFFICIENCY)


def _fill(composed: DictConfig, pipeline: dict[str, Any], **launch: int) -> DictConfig:
    filled = copy.deepcopy(composed)
    filled.pipeline.update(pipeline)
    filled.launch.update(launch)
    return filled


def _find_shape(known: dict[str, Any]) -> dict[str, Any]:
    """Return a schedule, a number of stages, and a number of stages per device that fit what is known."""
    shared = known.get("stages_per_device", 1) > 1
    schedule = known["schedule"].value if "schedule" in known else "interleaved_1f1b" if shared else "gpipe"
    fitting = {"interleaved_1f1b": known.get("num_stages", 2), "zb_v": 2}
    per_device = known.get("stages_per_device", fitting.get(schedule, 1))
    return {"schedule": schedule, "num_stages": per_device, "stages_per_device": per_device}


def _count_devices(run: RunConfig, accelerator: str) -> int:
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if accelerator == "cpu":
        return max(1, len(own_cores()) // (run.launch.num_threads or 1))
    import torch

    return torch.cuda.device_count()


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def spell_out(composed: DictConfig, run: RunConfig, words: Sequence[str]) -> list[str]:
    """Return the words of the command line with the planner's choices filled in.

    With them, a record's command repeats the run on any machine. They set everything in the pipeline: with
    pipeline=auto, an experiment's `pipeline:` values do not count, but with pipeline=gpipe they may.
    """
    if not is_open(composed):
        return list(words)
    plain = to_plain(run)
    said = {f"pipeline.{key}": value for key, value in plain["pipeline"].items()}
    said |= {f"launch.{key}": plain["launch"][key] for key in ("num_replicas", "num_processes")}
    said = {key: value if isinstance(value, str) else json.dumps(value).replace(" ", "") for key, value in said.items()}
    kept = [word for word in words if word.partition("=")[0].lstrip("+") not in {"pipeline", *said}]
    return [*kept, "pipeline=gpipe", *(f"{key}={value}" for key, value in said.items())]
