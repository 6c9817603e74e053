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
    """The result of one training step, the same on every process but for what is said to be of one.

    Attributes:
        step: the number of the step, from 0.
        loss: of the whole mini-batch, over all replicas.
        metrics: what the loss function returned beside the loss, averaged over the mini-batch as the loss is.
        notes: what each process of the job passed as its note, None where it passed none: replica by replica, in the
            order of their first stages.
        num_examples: of this replica's mini-batch.
        num_microbatches: into which it was cut.
        timeline: of all stages, where it was asked for.
        step_seconds: from the call of train_step to its end, on this process.
        peak_memory_bytes: the most that this process ever held: of GPU memory on CUDA, of main memory on the CPU.
        is_skipped: whether a scaler skipped the step: no process has gradients.
        outputs: of the model for the mini-batch, in the last stage's process, where they were asked for.
        gradient_norm: of all gradients together, before they were clipped; None where they were not to be.
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
    """Return the most memory that this process held, in bytes: the sum over CUDA devices, else main memory.

    It is the most so far, or since `reset_peak_memory`.
    """
    cuda = [device for device in devices if device.type == "cuda"]
    if cuda:
        return sum(torch.cuda.max_memory_allocated(device) for device in cuda)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory() -> OSError | None:
    """Let the peak begin anew: of several trainings in one process, each has its own.

    Returns:
        Why the system did not do so for main memory; None where it did.
    """
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux alone, see proc(5)
    except OSError as error:
        return error
    return None
