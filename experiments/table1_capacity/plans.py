"""Plan Table 1: the memory of each device with each cut, and the largest model that fits."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

from experiments.table1_capacity.columns import Column, compute_loss, describe
from gpipe.planning.accelerator import Speed, find_accelerator
from gpipe.planning.cut import partition_by_memory
from gpipe.planning.evaluation import Evaluation
from gpipe.planning.exact_cut import partition_layers
from gpipe.planning.planner import Cut, Planner, find_largest_size
from gpipe.planning.profile import LayerProfile, profile_layers
from gpipe.planning.step import Setting

EFFICIENCY = 0.5  # of the planned seconds; no figure of this table depends on it


def cut_by_variance(profiles: Sequence[LayerProfile], setting: Setting, _: Evaluation | None = None) -> list[int]:
    """Cut as the paper does: least variance of the stages' FLOPs."""
    flops = [sum(work.flops for work in profile.forward) for profile in profiles[:-1]]
    return partition_layers(flops, setting.num_stages, objective="variance")


CUTS: dict[str, Cut] = {"variance of FLOPs": cut_by_variance, "memory": partition_by_memory}


def make_planner(column: Column, cut: Cut) -> Planner:
    """Return the planner of a column on the paper's accelerators."""
    device = find_accelerator(column.device)
    speed = Speed.of(device, "float32", EFFICIENCY)
    return Planner(partial(profile, column), cut, column.batch_size, device, speed)


@cache  # both cuts ask
def profile(column: Column, size: int) -> list[LayerProfile]:
    """Return the profiles of a column's layers with micro-batches of a size."""
    return profile_layers(column.layers(), compute_loss, column.batch(size))


def plan(column: Column) -> dict[str, Any]:
    """Return a column of the table: parameters, and the memory of each device with each cut."""
    cuts = {}
    for name, cut in CUTS.items():
        found = make_planner(column, cut).plan(column.setting)
        cuts[name] = {"partitions": found.partitions, "devices": [asdict(memory) for memory in found.memory]}
    counts = {"parameters": count_parameters(column)}
    if column.family == "amoebanet":
        counts["parameters_with_auxiliary_head"] = count_parameters(column, as_public_code=True)
    room = find_accelerator(column.device).memory_bytes
    return {**describe(column), **counts, "memory_bytes": room, "cuts": cuts}


def count_parameters(column: Column, *, as_public_code: bool = False) -> int:
    """Count a column's parameters; `as_public_code`: with an auxiliary head and 1001 classes."""
    return sum(parameter.numel() for parameter in column.layers(as_public_code=as_public_code).parameters())


def find_largest(column: Column) -> dict[str, Any]:
    """Return the size of the largest model that fits the column's devices, and its parameters, with each cut.

    The size is AmoebaNet's D, in steps of 16 at the column's L, or the Transformer's L.
    """
    start, step = (16, 16) if column.num_filters else (column.num_stages, 1)
    sizes = {name: find_largest_size(_make_check(column, cut), start, step) for name, cut in CUTS.items()}
    counts = {name: None if size is None else count_parameters(resize(column, size)) for name, size in sizes.items()}
    return {**describe(column), "largest": sizes, "parameters": counts}


def resize(column: Column, size: int) -> Column:
    """Return the column with another D, or the Transformer with another L."""
    return replace(column, num_filters=size) if column.num_filters else replace(column, num_layers=size)


def _make_check(column: Column, cut: Cut) -> Callable[[int], bool]:
    return lambda size: make_planner(resize(column, size), cut).fits(column.setting)
