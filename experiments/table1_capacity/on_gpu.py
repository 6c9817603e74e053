"""Measure the columns of Table 1: one process plays all stages on one GPU; the allocator reports each stage's peak.

A stage does not fit if it needs more memory than the paper's accelerators have. If the GPU itself runs out of memory,
that is the result. Of a Transformer, only the first, a middle and the last stage are measured: the others equal the
middle one.
"""

import gc
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

import gpipe
from experiments.planned_memory.stage_accounting import Allocator, CudaAllocator, measure_peaks
from experiments.table1_capacity.columns import Column, compute_loss, describe
from experiments.table1_capacity.plans import make_planner
from gpipe.planning.cut import partition_by_memory
from gpipe.records import Record, make_record


def measure_columns(columns: Iterable[Column]) -> Record:
    """Return a record of every column."""
    torch.set_float32_matmul_precision("high")  # only bytes are read, so products may be quick
    found = [measure(column, "cuda", CudaAllocator()) for column in columns]
    return make_record(
        kind="measured",
        experiment="table1_capacity",
        config={},
        seed=0,
        results={"columns": found},
        gpus=[torch.cuda.get_device_name(0)],
    )


def measure(column: Column, device: str, allocator: Allocator) -> dict[str, Any]:
    """Return the measured and the planned peak of each measured stage, in bytes."""
    planner, setting = make_planner(column, partition_by_memory), column.setting
    planned = planner.plan(setting)
    partitions = planned.partitions
    stages = list(range(len(partitions)))
    if column.family == "transformer" and len(stages) > 3:
        stages = [0, len(stages) // 2, len(stages) - 1]
    room = planner.accelerator.memory_bytes
    result = {
        **describe(column),
        "partitions": partitions,
        "stages": stages,
        "planned_bytes": [planned.memory[stage].peak_bytes for stage in stages],
        "memory_bytes": room,
    }
    try:
        peaks = _measure_peaks(
            column, [partitions[stage] for stage in stages], _take_stages(column, partitions, stages), device, allocator
        )
    except (torch.cuda.OutOfMemoryError, gpipe.PipelineError) as error:
        # The pipeline says where it happened.
        if not isinstance(error.__cause__ or error, torch.cuda.OutOfMemoryError):
            raise
        result["out_of_memory"] = ". ".join(str(error).split(". ")[:2])  # then come the allocator's figures
    else:
        result |= {"peak_bytes": peaks, "fits": max(peaks) <= room}
    gc.collect()  # watched stages are in cycles: without this, the next column finds the memory taken
    torch.cuda.empty_cache()
    return result


def _take_stages(column: Column, partitions: Sequence[int], stages: Sequence[int]) -> nn.Sequential:
    """Return the layers of some stages; Transformer layers are alike, so the stages fit together."""
    starts = [0, *accumulate(partitions)]
    layers = column.layers()
    return nn.Sequential(*(layer for stage in stages for layer in layers[starts[stage] : starts[stage + 1]]))


def _measure_peaks(
    column: Column, partitions: Sequence[int], layers: nn.Sequential, device: str, allocator: Allocator
) -> list[int]:
    setting = column.setting
    pipeline = gpipe.Pipeline(
        layers,
        compute_loss,
        partitions,
        setting.num_microbatches,
        rematerialize=setting.rematerialize.value,
        devices=device,
    )
    return measure_peaks(pipeline, column.batch(column.batch_size, device), allocator)
