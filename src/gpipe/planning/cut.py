"""Cut a model so that the fullest device is as empty as can be."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise

from gpipe.planning.step import Setting, plan_device, plan_memory
from gpipe.planning.memory import stage_memory
from gpipe.planning.profile import LayerProfile

_PRECISION_BYTES = 2**16  # of the limit that the search ends with


def partition_by_memory(profiles: Sequence[LayerProfile], setting: Setting) -> list[int]:
    """Return the number of layers of each stage, such that the largest peak memory of a device is smallest.

    Args:
        profiles: of each layer and the loss.
        setting: how the model is run; one stage a device.

    Raises:
        ValueError: stages share devices, or there are more stages than layers.
    """
    num_layers, num_stages = len(profiles) - 1, setting.num_stages
    if setting.stages_per_device != 1:
        raise ValueError(
            f"partition_by is memory with {setting.stages_per_device} stages a device, which it cannot balance: "
            "choose flops, or a schedule with one stage a device."
        )
    if num_stages > num_layers:
        raise ValueError(f"num_stages is {num_stages}, but the model has {num_layers} layers: choose at most as many.")
    even = [(stage + 1) * num_layers // num_stages - stage * num_layers // num_stages for stage in range(num_stages)]
    enough = max(memory.peak_bytes for memory in plan_memory(profiles, even, setting))
    limits = range(enough % _PRECISION_BYTES, enough + 1, _PRECISION_BYTES)  # the last one is enough
    best = bisect_left(limits, True, key=lambda limit: _ends(profiles, setting, limit) is not None)
    ends = _ends(profiles, setting, limits[best])
    assert ends is not None
    return [end - start for start, end in pairwise([0, *ends])]


def _ends(profiles: Sequence[LayerProfile], setting: Setting, limit: int) -> list[int] | None:
    """Return the ends of the stages, each as long as fits into `limit` bytes; None where the layers do not fit."""
    num_layers, num_stages = len(profiles) - 1, setting.num_stages
    ends: list[int] = []
    start = 0
    for stage in range(num_stages):
        furthest = num_layers - (num_stages - 1 - stage)  # each stage after it needs a layer
        end = _furthest(lambda end: _peak(profiles, setting, stage, start, end) <= limit, start, furthest)  # noqa: B023
        if end == start:
            return None
        ends.append(end)
        start = end
    return ends if start == num_layers else None


def _furthest(fits: Callable[[int], bool], start: int, furthest: int) -> int:
    """Return the last end of a stage that fits, `start` where none does; short stages are looked at first."""
    size = 1
    while start + size < furthest and fits(start + size):
        size *= 2
    candidates = range(start + size // 2 + 1, min(start + size, furthest) + 1)
    return start + size // 2 + bisect_left(candidates, True, key=lambda end: not fits(end))


def _peak(profiles: Sequence[LayerProfile], setting: Setting, stage: int, first: int, end: int) -> int:
    memory = {stage: stage_memory(profiles, first, end)}
    return plan_device(memory, stage, setting).peak_bytes
