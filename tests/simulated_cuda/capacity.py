"""A column of Table 1 on a GPU."""

from __future__ import annotations

import gc
from typing import Any

import torch

from experiments.planned_memory.stage_accounting import CudaAllocator
from experiments.table1_capacity.columns import Column
from experiments.table1_capacity.on_gpu import measure
from tests.simulated_cuda import allocator


def measure_with(rank: int, column: Column, memory_bytes: int | None) -> dict[str, Any]:
    """Measure a model's stages; the GPU has so much memory, or any."""
    allocator.memory_bytes = memory_bytes
    return measure(column, "cuda", CudaAllocator())


def count_left_behind(rank: int, column: Column) -> int:
    """Return the bytes that are allocated after a measurement, where Python collects nothing by itself."""
    gc.disable()
    measure(column, "cuda", CudaAllocator())
    return torch.cuda.memory_allocated()
