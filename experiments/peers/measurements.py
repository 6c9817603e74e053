"""Measure the speed of the engines in turns, and the growth of memory in each engine's own processes."""

import gc
from functools import partial

import torch.distributed as dist

from experiments.peers.engines import ENGINES, Place, count_processes, explain_not_run
from experiments.peers.processes import Cell, fence, make_host_group, run
from experiments.peers.workloads import SCALES
from experiments.turns import clock, take_turns
from gpipe.pipeline.measurement.step_report import measure_peak_memory, reset_peak_memory


def measure_seconds_in_turns(cell: Cell, rounds: int) -> dict[str, list[float]]:
    """Run the engines in turns, A B C A B C ...; return the seconds of each round."""
    return run(_time_engines, cell, cell.num_processes, rounds, device=cell.device)


def measure_memory_growth(cell: Cell, engine: str) -> int | None:
    """Return the growth of an engine's largest process, with weights and gradients."""
    return run(_measure_growth, cell, count_processes(engine, cell.num_processes), engine, device=cell.device)


def _time_engines(cell: Cell, place: Place, rounds: int) -> dict[str, list[float]]:
    setting = cell.model, cell.partitions, cell.num_microbatches, place
    wait = partial(fence, place)
    ways = {}
    for name, make in ENGINES.items():
        if explain_not_run(name, cell.num_stages, place.num_processes) is None:
            takes_part = place.rank < count_processes(name, place.num_processes)
            step = make(*setting).step if takes_part else lambda: None
            ways[name] = partial(clock, step, fence=wait)
    return take_turns(ways, rounds, what=None)


def _measure_growth(cell: Cell, place: Place, engine: str) -> int | None:
    _warm_up(cell, place, engine)
    failure = reset_peak_memory()
    before = measure_peak_memory({*place.devices})
    made = ENGINES[engine](cell.model, cell.partitions, cell.num_microbatches, place)
    made.step()
    grown = None if failure else measure_peak_memory({*place.devices}) - before
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
