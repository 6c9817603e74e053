"""Print a plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from gpipe.pipeline.schedule import Kind
from gpipe.pipeline.timeline import Timeline
from gpipe.planning.accelerator import GIB, Accelerator
from gpipe.planning.planner import Planner
from gpipe.planning.step import Plan

WIDTH = 120  # characters of a table, also when the output is a pipe


def print_plan(planner: Planner, plan: Plan, name: str, console: Console | None = None) -> None:
    """Print one row per stage, or per group of equal stages, and whether the step fits or what would."""
    setting, accelerator = plan.setting, planner.accelerator
    console = console or Console(highlight=False, width=WIDTH)
    replicas = f", R={setting.num_replicas} replicas" if setting.num_replicas > 1 else ""
    is_even = setting.num_replicas * setting.num_microbatches * plan.microbatch_size == plan.batch_size
    title = (
        f"{name}: K={setting.num_stages} stages, M={setting.num_microbatches} micro-batches of "
        f"{'' if is_even else 'up to '}{plan.microbatch_size}, "
        f"N={plan.batch_size}{replicas}, {setting.schedule}, {_describe_kept(plan)}, on {accelerator.name} "
        f"({gib(accelerator.memory_bytes)})"
    )
    if setting.synchronizes:
        title += "; the exchanges of batch norm are not timed"
    console.print(title, soft_wrap=True)
    table = Table()
    size_unit, size_name = (GIB, "GiB") if plan.peak_bytes >= 0.1 * GIB else (2**20, "MiB")
    flop_unit, flop_name = (1e12, "TFLOP") if max(stage.flops for stage in plan.stages) >= 1e11 else (1e9, "GFLOP")
    columns = ("parameters", size_name, "stash", "activations", "peak", flop_name, "F ms", "B ms", "send ms")
    for column in ("stage", "layers", *columns):
        table.add_column(column, justify="right")
    rows = [_make_row(plan, index, size_unit, flop_unit) for index in range(len(plan.stages))]
    for _, group in groupby(enumerate(rows), key=lambda item: item[1][2:]):
        stages = list(group)
        first, last = stages[0], stages[-1]
        layers = f"{first[1][0]}-{last[1][1]}"
        table.add_row(str(first[0]) if first is last else f"{first[0]}-{last[0]}", layers, *first[1][2:])
    console.print(table)
    console.print(_describe_totals(plan), soft_wrap=True)
    if planner.seconds is not None:
        console.print("The seconds of the layers are measured, not those of a roofline.", soft_wrap=True)
    console.print(_describe_processes(plan), soft_wrap=True)
    remedies = [] if plan.peak_bytes <= accelerator.memory_bytes else planner.remedies(setting)
    console.print(_describe_fit(plan, accelerator, remedies), soft_wrap=True)


def print_choices(
    plans: Sequence[Plan], accelerator: Accelerator, num_devices: int, console: Console | None = None
) -> None:
    """Print the fastest settings, and why each of the others is slower than the first."""
    console = console or Console(highlight=False, width=WIDTH)
    console.print(f"The fastest ways to run it on {num_devices} x {accelerator.name}, planned:", soft_wrap=True)
    table = Table()
    for column in ("R x K", "schedule", "M", "recompute", "step s", "peak", "bubble", ""):
        table.add_column(column, justify="left" if column in ("schedule", "recompute", "") else "right")
    for plan in plans:
        setting = plan.setting
        shared = f" ({setting.stages_per_device} each)" if setting.stages_per_device > 1 else ""
        table.add_row(
            f"{setting.num_replicas} x {setting.num_stages}",
            f"{setting.schedule}{shared}",
            str(setting.num_microbatches),
            str(setting.rematerialize) if plan.kept_graphs is None else "what does not fit",
            _format(plan.step_seconds),
            gib(plan.peak_bytes),
            f"{plan.timeline.bubble:.1%}",
            "chosen" if plan is plans[0] else _explain_loss(plans[0], plan),
        )
    console.print(table)


def _explain_loss(best: Plan, other: Plan) -> str:
    """Say what makes a step longer than the best one, per device."""
    longer = {name: seconds - _divide_step(best)[name] for name, seconds in _divide_step(other).items()}
    name = max(longer, key=longer.__getitem__)
    slower = f"+{other.step_seconds / best.step_seconds - 1:.1%}"
    return "as fast" if slower == "+0.0%" else f"{slower}: {name} {_format(longer[name])} s more"


def _divide_step(plan: Plan) -> dict[str, float]:
    """Return the seconds of a step, divided by what an average device does."""
    busy, recomputed = (sum(plan.timeline.busy_seconds(kind)) for kind in (None, Kind.RECOMPUTE))
    count = len(plan.memory)
    return {
        "computes": (busy - recomputed) / count,
        "recomputes": recomputed / count,
        "waits": plan.timeline.makespan_seconds - busy / count,
        "averages": plan.averaging_seconds,
        "updates": plan.update_seconds,
    }


def compare_with_plan(plan: Plan, measured: Timeline) -> str:
    """Return one line per stage with the mean milliseconds of its tasks, measured and planned, and one for the step."""
    mean = measured.mean_seconds()
    found = {(task.stage, task.kind): mean(task) for task, _, _ in measured.events}
    lines = []
    for stage, planned in enumerate(plan.stages):
        parts = [
            f"{kind.words} {_format(1e3 * found[stage, kind])} ({_format(1e3 * planned.seconds(kind))})"
            for kind in Kind
            if (stage, kind) in found
        ]
        lines.append(f"stage {stage}: {', '.join(parts)}")
    whole = [_format(1e3 * timeline.makespan_seconds) for timeline in (measured, plan.timeline)]
    step = f"the step, from its first task to its last: {whole[0]} ({whole[1]})"
    return "\n".join(["milliseconds per micro-batch, measured (planned):", *lines, step])


def _describe_kept(plan: Plan) -> str:
    """Say which micro-batches are recomputed."""
    if plan.kept_graphs is None:
        return f"recompute {plan.setting.rematerialize}"
    least, most = min(plan.kept_graphs), max(plan.kept_graphs)
    return f"recompute all but {least} to {most} of {plan.setting.num_microbatches} micro-batches"


def _describe_processes(plan: Plan) -> str:
    """Say which process plays which stage."""
    setting, num_devices = plan.setting, len(plan.memory)
    if setting.is_sequential:
        return "One process plays all stages, one task after the other."
    shared = "s" if setting.stages_per_device == 1 else f"s mod {num_devices}"
    if setting.placement[-1] == 0 and num_devices > 1:  # a V
        shared = f"min(s, {setting.num_stages - 1} - s)"
    if setting.num_replicas == 1:
        return f"Process {shared} plays stage s."
    return f"Process {num_devices} r + {shared} plays stage s of replica r."


def _describe_fit(plan: Plan, accelerator: Accelerator, remedies: Sequence[str]) -> str:
    """Say whether a plan fits the accelerator, and if not, what would."""
    training = [memory.peak_bytes for memory in plan.memory]
    peaks = max(training, plan.evaluation_bytes, key=lambda sizes: max(sizes, default=0))
    fullest = peaks.index(plan.peak_bytes)
    what = "stage" if plan.setting.stages_per_device == 1 else "device"
    when = "" if peaks is training else " in an evaluation"
    needs = f"{what} {fullest} needs {gib(plan.peak_bytes)} of {gib(accelerator.memory_bytes)}{when}"
    if plan.peak_bytes <= accelerator.memory_bytes:
        return f"fits: {needs}"
    found = f"{', or '.join(remedies) or 'no larger K and no larger M'} fits"
    if max(training) <= accelerator.memory_bytes:
        found += f"{', or a' if remedies else ':'} lower trainer.evaluation.batch_size"
    return f"does not fit: {needs}; {found}"


def gib(size: int) -> str:
    """Return a size in bytes with its unit."""
    value = size / GIB
    return f"{value:.1f} GiB" if 1 <= value < 100 else f"{value:.3g} GiB"


def _make_row(plan: Plan, index: int, size_unit: float, flop_unit: float) -> tuple[str, ...]:
    """Return a stage's first and last layer, then its figures, and those of the device if it is the device's first."""
    stage = plan.stages[index]
    memory = [""] * 4
    if index < len(plan.memory):
        device = plan.memory[index]
        sizes = (device.parameter_bytes, device.stash_bytes, device.activation_bytes, device.peak_bytes)
        memory = [f"{size / size_unit:.2f}" for size in sizes]
    seconds = (stage.work.forward, stage.work.backward, stage.transfer_seconds)
    return (
        str(stage.first_layer),
        str(stage.last_layer),
        f"{stage.parameters:,}",
        *memory,
        _format(stage.flops / flop_unit),
        *(_format(1e3 * value) for value in seconds),
    )


def _format(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _describe_totals(plan: Plan) -> str:
    memory, activations = (
        sum(getattr(device, name) for device in plan.memory) for name in ("parameter_bytes", "activation_bytes")
    )
    seconds = plan.step_seconds
    evaluation = f" An evaluation needs {gib(max(plan.evaluation_bytes))}." if plan.evaluation_bytes else ""
    bubble = "" if plan.bubble is None else f"{describe_bubble(plan)}, "
    devices = "The device" if len(plan.memory) == 1 else f"All {len(plan.memory)} devices"
    devices += " of each replica" if plan.setting.num_replicas > 1 else ""
    return (
        f"{_describe_parameters(plan)}. {devices}: {gib(memory)} of parameters, gradients and "
        f"optimiser state; {gib(activations)} of activations.{evaluation}\n"
        f"Planned step: {_format(seconds)} s, {_format(plan.batch_size / seconds)} examples/s; {bubble}the slowest "
        f"stage is {plan.imbalance:.1%} above the mean, update {plan.update_seconds / seconds:.1%}, model FLOPs "
        f"utilisation {plan.utilization:.1%}."
    )


def describe_bubble(plan: Plan) -> str:
    """Return the simulated bubble of a plan that has one, and that of equal stages."""
    return f"bubble {plan.bubble:.1%} ({plan.equal_stages_bubble:.1%} if all stages were equal)"


def _describe_parameters(plan: Plan) -> str:
    """Return a model's number of parameters in words, with those that only training uses and the copies in stages."""
    text = f"{plan.parameters:,} parameters"
    if plan.auxiliary_parameters:
        text = f"{plan.evaluated_parameters:,} parameters in the network that is evaluated, {plan.parameters:,} with "
        text += "the auxiliary head of training"
    if plan.tied_parameters:
        text += f" (the rows have {plan.tied_parameters:,} more: each layer has its own copy of a tied one)"
    return text
