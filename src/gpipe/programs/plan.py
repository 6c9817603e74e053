"""Plan a run with checked settings, and print the plan."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from gpipe.config import AmoebaNetConfig, ConfigError, RunConfig, TimmConfig, TransformersConfig, to_run
from gpipe.config.plan import Find, PlanConfig
from gpipe.launch.errors import report_errors
from gpipe.planning.accelerator import Accelerator, find_accelerator
from gpipe.planning.planner import Planner, find_largest_size
from gpipe.planning.report import print_plan
from gpipe.programs.automatic import DevicesToUse, choose_pipeline, find_devices_at_hand
from gpipe.programs.calibrate import calibrate
from gpipe.programs.calibration_files import find_calibration
from gpipe.programs.layout import accelerator_at_hand, build_planner, build_setting
from gpipe.programs.workloads import workload_of

_STEPS = {Find.num_filters: 16, Find.num_layers: 1}
_MOST = 2048  # layers or filters; the largest model of Table 1 has 1,663 layers
_QUIET_SECONDS = 5.0


def choose(composed: DictConfig, words: Sequence[str]) -> RunConfig:
    """Return the settings of a plan with the choices of pipeline=auto; with calibrate=true, measure first."""
    chosen = to_run(choose_pipeline(composed, words, find_devices))
    if not composed.calibrate:
        return chosen
    calibrate(chosen)
    again = to_run(choose_pipeline(composed, words, find_devices))
    assert isinstance(again, PlanConfig)
    return replace(again, calibrate=False)


def find_devices(run: RunConfig, num_processes: int | None = None) -> DevicesToUse:
    """Return the devices that a plan is for; the command line may set their number as a number of processes."""
    assert isinstance(run, PlanConfig)
    count = run.num_devices or num_processes
    if num_processes not in (None, count):
        raise ConfigError(
            f"num_devices is {run.num_devices}, but launch.num_processes is {num_processes}, expected the same number "
            "or one of the two alone: leave one out."
        )
    accelerator = _find_accelerator(run)
    room = run.pipeline.memory_limit_bytes or accelerator.room_bytes
    if run.device == "auto":
        found = find_devices_at_hand(run, count, run.efficiency)
        return replace(found, accelerator=accelerator, room_bytes=found.room_bytes if run.memory_gib is None else room)
    if count is None:
        raise ConfigError(
            f"num_devices is null, expected how many {run.device} pipeline=auto may use: set num_devices=8, for "
            "example."
        )
    return DevicesToUse(accelerator, count, room, run.efficiency)


def _find_accelerator(plan: PlanConfig) -> Accelerator:
    found = accelerator_at_hand(plan) if plan.device == "auto" else find_accelerator(plan.device)
    return found.with_limits(memory_gib=plan.memory_gib, link_gb_per_second=plan.link_gb_per_second)


def start(plan: PlanConfig) -> None:
    """Print the plan of a run or of the largest model; an error is one message and an exit with status 1."""
    with report_errors(debug=plan.launch.debug):
        accelerator = _find_accelerator(plan)
        layers = workload_of(plan).layers()  # kept alive, because tracing another library's model takes seconds
        if plan.calibrate:
            if plan.find is None:
                build_planner(plan, accelerator)  # refuses settings before it takes long to measure the layers
            calibrate(plan)
        planner = _build_planner(plan, accelerator) if plan.find is None else _find_largest(plan, accelerator)
        print_plan(planner, planner.plan(build_setting(plan, accelerator)), plan.name)
        del layers


def _build_planner(plan: PlanConfig, accelerator: Accelerator) -> Planner:
    calibration = find_calibration(plan, accelerator)
    return build_planner(plan, accelerator, efficiency=plan.efficiency, calibration=calibration)


def _find_largest(plan: PlanConfig, accelerator: Accelerator) -> Planner:
    """Return the planner of the largest model that fits, and print its size."""
    assert plan.find is not None
    name, setting = plan.find.value, build_setting(plan, accelerator)
    is_amoebanet = isinstance(plan.model, AmoebaNetConfig)
    if isinstance(plan.model, TimmConfig | TransformersConfig):
        raise ConfigError(
            f"find is {name}, but model.name and model.arguments determine the size of a {plan.model.family} model: "
            "set those, and find=null."
        )
    if not is_amoebanet and plan.find is Find.num_filters:
        raise ConfigError(f"find is {name}, but a {plan.model.family} has none: set find=num_layers.")
    step = 3 if is_amoebanet and plan.find is Find.num_layers else _STEPS[plan.find]
    planners: dict[int, Planner] = {}

    def change(value: int) -> PlanConfig:
        changes: dict[str, Any] = {name: value}
        return replace(plan, model=replace(plan.model, **changes))

    def fits(value: int) -> bool:
        planners[value] = _build_planner(change(value), accelerator)
        found = planners[value].fits(setting)
        if time.monotonic() - begin > _QUIET_SECONDS:
            print(f"{name}={value} {'fits' if found else 'does not fit'}", file=sys.stderr, flush=True)
        return found

    start = step
    if plan.find is Find.num_layers:  # the fewest that give each stage a layer
        few, more = (len(workload_of(change(value)).layers()) for value in (step, 2 * step))
        start += step * max(0, -(-(setting.num_stages - few) // (more - few)))
    begin = time.monotonic()
    size = find_largest_size(fits, start, step, _MOST)
    if size is None:
        limit = plan.pipeline.memory_limit_bytes
        within, remedy = ("", "") if limit is None else (f" with pipeline.memory_limit_bytes={limit}", "that, ")
        raise ConfigError(
            f"find is {name}, but even {start} does not fit {accelerator.name}{within}: raise {remedy}"
            "pipeline.num_stages or pipeline.num_microbatches."
        )
    print(f"The largest {name} that fits is {size}{'' if size < _MOST else ' or more: the search ends there'}.")
    return planners[size]
