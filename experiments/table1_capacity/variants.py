"""Columns of Table 1 with other choices where the paper names none, and their effect on the memory of activations."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.table1_capacity.columns import COLUMNS, NUM_MICROBATCHES, Column, compute_loss, describe
from gpipe.planning.planner import Cut
from gpipe.planning.profile import profile_layers
from gpipe.planning.step import plan_memory


@dataclass(frozen=True)
class Variant:
    """A column with another M, or with attention op by op, which keeps matrices of T x T."""

    column: Column
    num_microbatches: int = NUM_MICROBATCHES
    is_fused: bool = True


_TORCHGPIPES = 128  # micro-batches in benchmarks/amoebanetd-memory of its repository
VARIANTS = [
    Variant(column, num_microbatches, is_fused=column.family == "amoebanet")
    for column in COLUMNS
    if not column.name.startswith("Naive")
    for num_microbatches in (16, _TORCHGPIPES if column.num_filters else NUM_MICROBATCHES)
]


def vary(variant: Variant, cuts: Mapping[str, Cut]) -> dict[str, Any]:
    """Return, for each cut, the bytes of the fullest device, and the sum of all devices' peaks of activations."""
    column, num_microbatches = variant.column, variant.num_microbatches
    setting = replace(column.setting, num_microbatches=num_microbatches)
    with nullcontext() if variant.is_fused else sdpa_kernel(SDPBackend.MATH):
        profiles = profile_layers(column.layers(), compute_loss, column.batch(column.batch_size // num_microbatches))
    plans = {name: plan_memory(profiles, cut(profiles, setting, None), setting) for name, cut in cuts.items()}
    return {
        **describe(column),
        "num_microbatches": num_microbatches,
        "attention": None if column.num_filters else "fused" if variant.is_fused else "op by op",
        "activation_bytes": {name: sum(memory.activation_bytes for memory in plan) for name, plan in plans.items()},
        "peak_bytes": {name: max(memory.peak_bytes for memory in plan) for name, plan in plans.items()},
    }
