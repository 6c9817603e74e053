"""What happens between the checked settings of a plan and its printed answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpipe.config import AmoebaNetConfig, ConfigError
from gpipe.config.plan import Find, PlanConfig
from gpipe.launch.errors import one_message
from gpipe.planning.accelerator import Device, find_device
from gpipe.planning.step import Setting
from gpipe.planning.planner import Planner, largest
from gpipe.planning.report import print_forecast
from gpipe.planning.speed import Speed
from gpipe.programs.build import build_planner, build_setting

_STEPS = {Find.num_filters: 16, Find.num_layers: 1}


def start(plan: PlanConfig) -> None:
    """Print the plan of a run, or what was to be found; an error is one message and an exit with status 1."""
    with report_errors(debug=plan.launch.debug):
        device = find_device(plan.device).with_limits(
            memory_gib=plan.memory_gib, link_gb_per_second=plan.link_gb_per_second
        )
        if plan.find is None:
            planner, setting = _planner(plan, device), build_setting(plan)
        elif plan.find is Find.fastest:
            planner = _planner(plan, device)
            setting = _fastest(planner, plan, device)
        else:
            planner, setting = _largest(plan, device), build_setting(plan)
        _answer(planner, setting)


def _answer(planner: Planner, setting: Setting) -> None:
    found = planner.forecast(setting)
    fits = found.peak_bytes <= planner.device.memory_bytes
    remedies = [] if fits else planner.remedies(setting)
    print_forecast(found, setting, planner.batch_size, planner.device, remedies)


def _planner(plan: PlanConfig, device: Device) -> Planner:
    precision = "float32" if plan.trainer.autocast.value == "none" else plan.trainer.autocast.value
    return build_planner(plan, device, Speed.of(device, precision, plan.efficiency))


def _fastest(planner: Planner, plan: PlanConfig, device: Device) -> Setting:
    like = build_setting(plan)
    num_devices = plan.num_devices or like.num_devices
    best = planner.fastest(num_devices, like)
    if best is None:
        raise ConfigError(
            f"num_devices is {num_devices}, but on so many {device.name} no K, M and mode fits: raise num_devices, or "
            "choose a device with more memory."
        )
    return best[0]


def _largest(plan: PlanConfig, device: Device) -> Planner:
    """Return the planner of the largest model that fits, and say how large it is."""
    assert plan.find is not None
    name, setting = plan.find.value, build_setting(plan)
    is_amoebanet = isinstance(plan.model, AmoebaNetConfig)
    if not is_amoebanet and plan.find is Find.num_filters:
        raise ConfigError(f"find is {name}, but a {plan.model.family} has none: set find=num_layers.")
    step = 3 if is_amoebanet and plan.find is Find.num_layers else _STEPS[plan.find]
    planners: dict[int, Planner] = {}

    def fits(value: int) -> bool:
        changes: dict[str, Any] = {name: value}
        planners[value] = _planner(replace(plan, model=replace(plan.model, **changes)), device)
        return planners[value].fits(setting)

    start = step * max(1, -(-setting.num_stages // step)) if plan.find is Find.num_layers else step
    size = largest(fits, start, step)
    if size is None:
        raise ConfigError(
            f"find is {name}, but already {start} does not fit {device.name}: raise pipeline.num_stages or "
            "pipeline.num_microbatches."
        )
    print(f"The largest {name} that fits is {size}.")
    return planners[size]
