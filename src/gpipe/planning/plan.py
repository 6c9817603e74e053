"""The plan of a pipeline, printed before it starts: which layers each stage gets, and what that promises."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.partition import Objective, partition_layers
from gpipe.pipeline.shared.tied_parameters import TiedParameters
from gpipe.planning.cost import LayerCost, measure_layers


@dataclass(frozen=True)
class StagePlan:
    """One stage: its first and last layer, counted from 0, and what they cost; `share` is of the whole model's cost."""

    first_layer: int
    last_layer: int
    parameters: int
    parameter_bytes: int
    flops: int
    share: float


@dataclass(frozen=True)
class Plan:
    """How a model is cut. `share` and `imbalance` are measured in `cost_name`; `flops` are those of one micro-batch.

    `tied_parameters` is by how much the parameters of all stages exceed the model's: stages have copies of tied ones.
    `auxiliary_parameters` are those of the model's that only training uses.
    """

    stages: tuple[StagePlan, ...]
    num_microbatches: int
    microbatch_size: int
    cost_name: str
    stages_per_device: int = 1
    tied_parameters: int = 0
    auxiliary_parameters: int = 0

    @property
    def parameters(self) -> int:
        """The number of the model's parameters, a tied one counted once."""
        return sum(stage.parameters for stage in self.stages) - self.tied_parameters

    @property
    def evaluated_parameters(self) -> int:
        """The number of parameters of the network that is evaluated."""
        return self.parameters - self.auxiliary_parameters

    @property
    def partitions(self) -> list[int]:
        """The number of layers of each stage."""
        return [stage.last_layer - stage.first_layer + 1 for stage in self.stages]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row a stage, as JSON."""
        return [{"stage": index, **asdict(stage)} for index, stage in enumerate(self.stages)]

    @property
    def bubble(self) -> float:
        """The idle share of the devices' time if all stages were equal: (K-1)/(M+K-1) (paper, section 2).

        Of P devices with v stages each: (P-1)/(vM+P-1) (Narayanan et al. 2021, section 2.2.2).
        """
        others = len(self.stages) // self.stages_per_device - 1
        return others / (self.stages_per_device * self.num_microbatches + others)

    @property
    def bubble_law(self) -> str:
        """The formula of `bubble`."""
        return "(K-1)/(M+K-1)" if self.stages_per_device == 1 else f"(P-1)/({self.stages_per_device}M+P-1)"

    @property
    def imbalance(self) -> float:
        """By how much the most expensive stage exceeds the mean, as a fraction."""
        return max(stage.share for stage in self.stages) * len(self.stages) - 1


def plan_pipeline(
    layer_costs: Sequence[LayerCost],
    microbatch_sizes: Sequence[int],
    num_stages: int,
    *,
    partition_by: str = "flops",
    objective: Objective = "max",
    memory_limit_bytes: int | None = None,
    partitions: Sequence[int] | None = None,
    stages_per_device: int = 1,
    auxiliary_parameters: int = 0,
) -> Plan:
    """Choose which layers each stage gets, and add up what they cost.

    Args:
        layer_costs: of each layer, for the largest micro-batch.
        microbatch_sizes: of a mini-batch.
        num_stages: K.
        partition_by: the attribute of LayerCost to balance: flops, parameter_bytes or seconds.
        objective: as for `partition_layers`.
        memory_limit_bytes: most bytes of parameters in one partition; None is no limit.
        partitions: the number of layers of each stage, where they are not to be chosen.
        stages_per_device: v, where the schedule interleaves.
        auxiliary_parameters: how many parameters only training uses.

    Raises:
        ValueError: the layers cannot be cut so.
    """
    if partitions is not None:
        partition_by = "flops"  # nothing is balanced, and nobody has measured seconds
    costs = [float(getattr(cost, partition_by)) for cost in layer_costs]
    if partitions is None:
        memory_bytes = None if memory_limit_bytes is None else [cost.parameter_bytes for cost in layer_costs]
        partitions = partition_layers(
            costs,
            num_stages,
            objective=objective,
            memory_bytes=memory_bytes,
            memory_limit_bytes=memory_limit_bytes,
        )
    elif sum(partitions) != len(layer_costs):
        raise ValueError(
            f"partitions is {list(partitions)}, expected numbers that sum to the model's {len(layer_costs)} layers: "
            "correct it, or leave the choice to partition_by."
        )
    bounds = pairwise(accumulate(partitions, initial=0))
    total = sum(costs) or 1.0
    stages = tuple(_add_up(layer_costs[start:end], start, sum(costs[start:end]) / total) for start, end in bounds)
    tied = sum(cost.tied_parameters for cost in layer_costs)
    return Plan(
        stages,
        len(microbatch_sizes),
        max(microbatch_sizes),
        partition_by,
        stages_per_device,
        tied,
        auxiliary_parameters,
    )


def measure_seconds(
    layers: nn.Sequential,
    example: Any,
    seed: int,
    device: torch.device | str,
    on_layer: Callable[[float], None] | None = None,
) -> list[float]:
    """Time each layer's forward function on a device, with weights drawn from `seed`; `on_layer` hears of each.

    layers, example: on the meta device, the example as any tensors that the first layer takes. The layers get memory on
    `device`: describe the model anew for other use.
    """
    device = torch.device(device)
    real = nn.Sequential(*TiedParameters(layers).build(dict.fromkeys(range(len(layers)), device), seed).values())
    inputs = Payload.of(example)
    inputs.tensors = [torch.zeros_like(tensor, device=device) for tensor in inputs.tensors]
    costs = measure_layers(real, inputs.value(), on_layer=on_layer)
    return [cost.seconds or 0.0 for cost in costs]


def _add_up(costs: Sequence[LayerCost], first_layer: int, share: float) -> StagePlan:
    return StagePlan(
        first_layer=first_layer,
        last_layer=first_layer + len(costs) - 1,
        parameters=sum(cost.parameters for cost in costs),
        parameter_bytes=sum(cost.parameter_bytes for cost in costs),
        flops=sum(cost.flops for cost in costs),
        share=share,
    )


def print_plan(plan: Plan, name: str, processes: Sequence[str], console: Console | None = None) -> None:
    """Print a row a stage, and what the cut promises; `processes` says which plays each stage."""
    console = console or Console(highlight=False)
    batches = f"M={plan.num_microbatches} micro-batches of {plan.microbatch_size}"
    table = Table(title=f"{name}: K={len(plan.stages)} stages, {batches}", title_justify="left")
    for column in ("stage", "layers", "parameters", "MiB", "GFLOPs", f"share of {plan.cost_name}", "process"):
        table.add_column(column, justify="right")
    for index, (stage, process) in enumerate(zip(plan.stages, processes, strict=True)):
        table.add_row(
            str(index),
            f"{stage.first_layer}-{stage.last_layer}",
            f"{stage.parameters:,}",
            _readable(stage.parameter_bytes / 2**20),
            _readable(stage.flops / 1e9),
            f"{stage.share:.1%}",
            process,
        )
    console.print(table)
    console.print(
        f"{describe_parameters(plan.parameters, plan.auxiliary_parameters)}. Predicted bubble {plan.bubble_law} = "
        f"{plan.bubble:.1%}; the largest stage is {plan.imbalance:.1%} above the mean.",
        soft_wrap=True,
    )


def describe_parameters(parameters: int, auxiliary_parameters: int) -> str:
    """Return a model's number of parameters in words, given how many of them only training uses."""
    if auxiliary_parameters == 0:
        return f"{parameters:,} parameters"
    evaluated = parameters - auxiliary_parameters
    return (
        f"{evaluated:,} parameters in the network that is evaluated, {parameters:,} with the auxiliary head of training"
    )


def _readable(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
