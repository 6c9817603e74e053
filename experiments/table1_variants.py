"""Columns of Table 1 with other choices where the paper gives none: what they do to the memory of the activations."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from table1_columns import COLUMNS, NUM_MICROBATCHES, Column, describe, loss
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpipe.planning.cut import partition_by_memory
from gpipe.planning.forecast import plan_memory
from gpipe.planning.profile import profile_layers


@dataclass(frozen=True)
class Variant:
    """A column with another M, or with attention op by op, which keeps matrices of T x T instead of none."""

    column: Column
    num_microbatches: int = NUM_MICROBATCHES
    is_fused: bool = True


_AMOEBANETS, _TRANSFORMERS = COLUMNS[1:3], COLUMNS[6:8]  # Pipeline-1 and one more
VARIANTS = [
    *(
        Variant(column, num_microbatches)
        for column in _AMOEBANETS
        for num_microbatches in (NUM_MICROBATCHES, 128)  # torchgpipe's, benchmarks/amoebanetd-memory in its repository
    ),
    *(
        variant
        for column in _TRANSFORMERS
        for variant in (Variant(column), Variant(column, is_fused=False), Variant(column, 16, is_fused=False))
    ),
]


def vary(variant: Variant) -> dict[str, Any]:
    """Return the peaks of a variant's activations in bytes, added up over its devices, cut by memory."""
    column, num_microbatches = variant.column, variant.num_microbatches
    setting = replace(column.setting, num_microbatches=num_microbatches)
    with nullcontext() if variant.is_fused else sdpa_kernel(SDPBackend.MATH):
        profiles = profile_layers(column.layers(), loss, column.batch(column.batch_size // num_microbatches))
    devices = plan_memory(profiles, partition_by_memory(profiles, setting), setting)
    return {
        **describe(column),
        "num_microbatches": num_microbatches,
        "attention": None if column.num_filters else "fused" if variant.is_fused else "op by op",
        "activation_bytes": sum(memory.activation_bytes for memory in devices),
    }
