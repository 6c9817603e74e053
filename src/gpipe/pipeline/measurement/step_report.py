"""What a training step reports."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpipe.pipeline.timeline import Timeline


@dataclass(frozen=True)
class StepReport:
    """The result of one training step, the same on every process except where noted.

    Attributes:
        step: the number of the step, from 0.
        loss: of the whole mini-batch, over all replicas.
        metrics: the loss function's other scalars, averaged over the mini-batch as the loss is.
        notes: the note of each process of the job, None where it passed none: replica by replica, in the order of
            first stages.
        num_examples: of this replica's mini-batch.
        num_microbatches: into which it was cut.
        timeline: of all stages, if requested.
        step_seconds: from the call of train_step to its end, on this process.
        peak_memory_bytes: the most that this process has held: GPU memory on CUDA, main memory on the CPU.
        is_skipped: whether a scaler skipped the step: no process has gradients.
        outputs: of the model for the mini-batch, in the last stage's process, if requested.
        gradient_norm: of all gradients together, before clipping; None without clipping, or if the step is skipped.
    """

    step: int
    loss: float
    metrics: dict[str, float] = field(repr=False)
    notes: list[Any] = field(repr=False)
    num_examples: int
    num_microbatches: int
    timeline: Timeline | None = field(repr=False)
    step_seconds: float
    peak_memory_bytes: int
    is_skipped: bool = False
    outputs: Any = field(repr=False, default=None)
    gradient_norm: float | None = None


def measure_peak_memory(devices: Iterable[torch.device]) -> int:
    """Return this process's peak memory in bytes: the sum over its GPUs, or else that of main memory.

    It is the peak since the process began, or since `reset_peak_memory`.
    """
    cuda = [device for device in devices if device.type == "cuda"]
    if cuda:
        return sum(torch.cuda.max_memory_allocated(device) for device in cuda)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory() -> OSError | None:
    """Reset the peak, so that each of several trainings in one process has its own.

    Returns:
        Why the system could not reset the peak of main memory; None if it did.
    """
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux only, see proc(5)
    except OSError as error:
        return error
    return None
