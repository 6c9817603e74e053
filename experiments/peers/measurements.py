"""Measure the speed of the engines in turns, and the growth of memory in each engine's own processes."""

from __future__ import annotations

import gc
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.peers.engines import ENGINES, Place, count_processes, explain_not_run
from experiments.peers.processes import Cell, fence, make_host_group, run
from experiments.peers.workloads import SCALES


def measure_seconds_in_turns(cell: Cell, rounds: int, steps: int) -> dict[str, list[float]]:
    """Run the engines in turns, A B C A B C ..., several steps each; return the seconds per step of each round."""
    return run(_time_engines, cell, cell.num_processes, rounds, steps)


def measure_peak_memory(cell: Cell, engine: str, steps: int) -> int | None:
    """Return the growth of an engine's largest process, with weights and gradients."""
    return run(_measure_growth, cell, count_processes(engine, cell.num_processes), engine, steps)


def _time_engines(cell: Cell, place: Place, rounds: int, steps: int) -> dict[str, list[float]]:
    setting = cell.model, cell.partitions, cell.num_microbatches, place
    engines = {
        name: make(*setting).step if place.rank < count_processes(name, place.num_processes) else None
        for name, make in ENGINES.items()
        if explain_not_run(name, cell.num_stages, place.num_processes) is None
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        for name, step in engines.items():
            fence(place)
            start = time.perf_counter()
            for _ in range(steps if step is not None else 0):
                step()
            fence(place)
            if turn > 0:  # the first one warms up
                seconds[name].append((time.perf_counter() - start) / steps)
    return seconds


def _measure_growth(cell: Cell, place: Place, engine: str, steps: int) -> int | None:
    _warm_up(cell, place, engine)
    before = _reset_peak(place)
    made = ENGINES[engine](cell.model, cell.partitions, cell.num_microbatches, place)
    for _ in range(steps):
        made.step()
    peak = _read_peak(place)
    grown = None if before is None or peak is None else peak - before
    parts: list[int | None] = [None] * place.num_processes
    dist.all_gather_object(parts, grown, group=make_host_group())  # noqa: TID251 - between processes that this program started
    return max((part for part in parts if part is not None), default=None)


def _warm_up(cell: Cell, place: Place, engine: str) -> None:
    """Make steps of a tiny model, so that what libraries load at first use does not count."""
    tiny = SCALES["tiny"][cell.workload]
    num_layers, others = len(tiny.layers()), cell.num_stages - 1
    ENGINES["torchgpipe"](tiny, [num_layers], 2, Place(0, 1, place.devices[:1], None)).step()  # all kinds of layers
    ENGINES[engine](tiny, [num_layers - others, *[1] * others], 2, place).step()
    gc.collect()


def _reset_peak(place: Place) -> int | None:
    """Reset the peak; return the memory in use now, on the GPU or in main memory, or None if unknown."""
    if place.devices[0].type == "cuda":
        for device in set(place.devices):
            torch.cuda.reset_peak_memory_stats(device)
        return 0  # a process has nothing else on its GPUs
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(
            "5", encoding="ascii"
        )  # Linux: resets the peak to what is resident now
    return _read_status_bytes("VmRSS")


def _read_peak(place: Place) -> int | None:
    if place.devices[0].type == "cuda":
        return max(torch.cuda.max_memory_allocated(device) for device in set(place.devices))
    return _read_status_bytes("VmHWM")


def _read_status_bytes(name: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return 1024 * int(line.split()[1])
    return None
