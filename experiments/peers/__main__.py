"""Measure three engines on the same models: ours, torch.distributed.pipelining and torchgpipe.

    python -m experiments.peers

All have the same initial weights, mini-batches, partitions and micro-batches. Everything is recomputed, and a step ends
with the gradients. There is one process per stage, each with one thread on its own core. torchgpipe has one process,
and does not overlap its stages on a CPU. torch's engine recomputes nothing by itself, so each of its stages is wrapped
in torch.utils.checkpoint.

Speed: the engines take turns in the same processes; medians count. Memory: the growth of an engine's largest process,
in fresh processes. Partitions: the choice of each package, judged by measured seconds. --device cuda measures on GPUs,
with one process per stage if there are enough GPUs, otherwise with all stages on one. Ten minutes for K = 1 and 2 on
two cores.
"""

import argparse
import os
import statistics
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

import gpipe
from experiments.peers.engines import ENGINES, explain_not_run
from experiments.peers.measurements import measure_memory_growth, measure_seconds_in_turns
from experiments.peers.partitions import compare_partitions
from experiments.peers.processes import Cell
from experiments.peers.workloads import MODELS, SCALES, Workload
from experiments.program import StudyProgram, track
from experiments.turns import median_ratio
from reproductions.table2_throughput.peers import OURS, PEERS

CLAIM = "table2_throughput"


def measure_cell(cell: Cell, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row per engine: its speed, our speed over it in the median pair, and its peak memory."""
    fixed = {"model": cell.model.title, "num_stages": cell.num_stages, "num_microbatches": cell.num_microbatches}
    fixed |= {"partitions": list(cell.partitions)}
    num_cores = len(os.sched_getaffinity(0))
    if cell.device == "cpu" and cell.num_stages > num_cores:
        reason = f"not run: {cell.num_stages} stages need {cell.num_stages} cores, here: {num_cores}"
        return [fixed | {"engine": name, "outcome": reason} for name in ENGINES]
    seconds = measure_seconds_in_turns(cell, options.rounds)
    rows = []
    for name in ENGINES:
        if name not in seconds:
            rows.append(fixed | {"engine": name, "outcome": explain_not_run(name, cell.num_stages, cell.num_processes)})
            continue
        row = fixed | {"engine": name, "outcome": "measured", "step_seconds": seconds[name]}
        row["examples_per_second"] = cell.model.batch_size / statistics.median(seconds[name])
        row["ours_over_this"] = median_ratio(seconds[name], seconds[OURS])
        row["peak_memory_bytes"] = measure_memory_growth(cell, name)
        rows.append(row)
    return rows


def measure_grid(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of all cells."""
    cells = []
    for name in options.models:
        workload = SCALES[options.scale][name]
        costs = [cost.flops for cost in gpipe.analyze_layers(workload.layers(), workload.batch("meta")[0])]
        for num_stages, num_microbatches in product(options.num_stages, options.num_microbatches):
            partitions = tuple(gpipe.partition_layers(costs, num_stages))
            cells.append(Cell(options.scale, name, partitions, num_microbatches, options.device))
    for cell in track(cells, "cells"):
        yield from measure_cell(cell, options)


def measure_partitions(workload: Workload, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return how each package cuts a model, for the micro-batches of M = 4."""
    nums_stages = [num for num in options.partitions if num <= len(workload.layers())]
    return compare_partitions(workload, nums_stages, max(workload.batch_size // 4, 1), torch.device(options.device))


def parse_numbers(text: str) -> list[int]:
    """Parse numbers such as 1,2,4."""
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    program = StudyProgram(__doc__, {CLAIM: PEERS.tables}, rounds=7, what_rounds_are="turns of each engine")
    parser = program.parser
    parser.add_argument("--scale", choices=SCALES, default="laptop", help="size of the models")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--num-stages", type=parse_numbers, default=[1, 2], help="K, such as 1,2,4,8")
    parser.add_argument("--num-microbatches", type=parse_numbers, default=[1, 4, 32], help="M, such as 1,4,32")
    parser.add_argument("--partitions", type=parse_numbers, default=[2, 4, 8], help="K whose partitions are compared")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = program.parse()
    if options.scale == "tiny":
        program.require_folder("--scale tiny only tries the program")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("not run: torch finds no GPU here; --device cpu measures on cores")
    torch.set_num_threads(1)
    workloads = [SCALES[options.scale][name] for name in options.models]
    partitions = [row for workload in workloads for row in measure_partitions(workload, options)]
    config = {"models": [workload.describe() for workload in workloads], "rounds": options.rounds}
    config |= {"steps": 1, "device": options.device, "rematerialize": "always"}
    results = {"grid": list(measure_grid(options)), "partitions": partitions}
    gpus = [torch.cuda.get_device_name()] if options.device == "cuda" else []
    program.publish_record(PEERS.make_record(config, results, gpus=gpus))
