"""A forecast, for people."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from gpipe.planning.accelerator import GIB, Device
from gpipe.planning.step import Forecast, Setting
from gpipe.planning.plan import describe_parameters

_COLUMNS = ("stage", "layers", "parameters", "GiB", "stash", "activations", "peak", "TFLOP", "F ms", "B ms", "send ms")
WIDTH = 120  # characters that the table may take, on a pipe too


def print_forecast(
    found: Forecast, setting: Setting, batch_size: int, device: Device, remedies: Sequence[str] = ()
) -> None:
    """Print a row a stage, those of equal stages once, what the step comes to, and whether it fits, or what would."""
    console = Console(highlight=False, width=WIDTH)
    replicas = f", R={setting.num_replicas} replicas" if setting.num_replicas > 1 else ""
    title = (
        f"K={setting.num_stages}, M={setting.num_microbatches}, N={batch_size}{replicas}, {setting.schedule}, "
        f"recompute {setting.rematerialize}, on {device.name} ({gib(device.memory_bytes)})"
    )
    if setting.synchronizes:
        title += "; the exchanges of batch norm are not timed"
    table = Table(title=title, title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    rows = [_row(found, index) for index in range(len(found.stages))]
    for _, group in groupby(enumerate(rows), key=lambda item: item[1][2:]):
        stages = list(group)
        first, last = stages[0], stages[-1]
        layers = f"{first[1][0]}-{last[1][1]}"
        table.add_row(str(first[0]) if first is last else f"{first[0]}-{last[0]}", layers, *first[1][2:])
    console.print(table)
    console.print(_sums(found, batch_size), soft_wrap=True)
    console.print(_verdict(found, setting, device, remedies), soft_wrap=True)


def _verdict(found: Forecast, setting: Setting, device: Device, remedies: Sequence[str]) -> str:
    """Say whether a forecast fits the device, and else what would."""
    peaks = [memory.peak_bytes for memory in found.memory]
    fullest = peaks.index(max(peaks))
    what = "stage" if setting.stages_per_device == 1 else "device"
    needs = f"{what} {fullest} needs {gib(max(peaks))} of {gib(device.memory_bytes)}"
    if max(peaks) <= device.memory_bytes:
        return f"fits: {needs}"
    return f"does not fit: {needs}; {', or '.join(remedies) or 'no larger K and no larger M'} fits"


def gib(size: int) -> str:
    """Return a size in bytes with its unit."""
    value = size / GIB
    return f"{value:.1f} GiB" if 1 <= value < 100 else f"{value:.3g} GiB"


def _row(found: Forecast, index: int) -> tuple[str, ...]:
    """Return first and last layer, then what is shown of a stage and, where it is a device's first, of the device."""
    stage = found.stages[index]
    memory = [""] * 4
    if index < len(found.memory):
        device = found.memory[index]
        sizes = (device.parameter_bytes, device.stash_bytes, device.activation_bytes, device.peak_bytes)
        memory = [f"{size / GIB:.2f}" for size in sizes]
    seconds = (stage.forward_seconds, stage.backward_seconds, stage.transfer_seconds)
    return (
        str(stage.first_layer),
        str(stage.last_layer),
        f"{stage.parameters:,}",
        *memory,
        f"{stage.flops / 1e12:.3g}",
        *(f"{1e3 * value:.3g}" for value in seconds),
    )


def _sums(found: Forecast, batch_size: int) -> str:
    memory, activations = (
        sum(getattr(device, name) for device in found.memory) for name in ("parameter_bytes", "activation_bytes")
    )
    seconds = found.step_seconds
    described = describe_parameters(found.parameters, found.auxiliary_parameters)
    return (
        f"{described}. All {len(found.memory)} devices: {gib(memory)} of parameters, gradients and "
        f"optimiser state; {gib(activations)} of activations.\n"
        f"Planned step: {seconds:.3g} s, {batch_size / seconds:.3g} examples/s; bubble {found.timeline.bubble:.1%}, "
        f"update {found.update_seconds / seconds:.1%}, model FLOPs utilisation {found.utilization:.1%}."
    )
