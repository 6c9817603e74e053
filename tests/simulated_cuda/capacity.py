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
    """Measure a model's stages; the GPU has so much memory, or any.

    Python collects nothing by itself. What is allocated afterwards is "left_bytes".
    """
    gc.disable()
    allocator.memory_bytes = memory_bytes
    found = measure(column, "cuda", CudaAllocator())
    return found | {"left_bytes": torch.cuda.memory_allocated()}
