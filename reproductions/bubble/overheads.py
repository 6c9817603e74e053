"""What the engine costs beside the work: other engines, other work on the machine, replicas, launches."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from gpipe.pipeline.schedule import Kind, gpipe
from gpipe.planning.simulation import simulate
from gpipe.records import Record
from reproductions.study import Study
from reproductions.table import format_value, markdown, write_table

HAND_WRITTEN = "hand-written loop"
_WAITS = ("spinning", "sleeping")  # how threads wait for each other
_ONE_STAGE = {
    "hand_written": "hand-written loop",
    "ours": "ours, K = 1",
    "checkpoint": "hand-written loop, torch.utils.checkpoint",
    "checkpoint_reentrant": "the same, reentrant: its first forward may run other kernels",
    "ours_rematerialized": "ours, K = 1, rematerialize='always'",
}
_ENGINE_OVERHEAD = Study("engine_overhead")
ONE_STAGE_OVERHEAD, THREADS_UNDER_LOAD = Study("one_stage_overhead"), Study("threads_under_load")
REPLICA_WAIT, LAUNCHING_THREADS = Study("replica_wait"), Study("launching_threads")
DEVICE_THREADS = Study("device_threads", "make gpu, on a machine with several GPUs")
engine_overhead_run = _ENGINE_OVERHEAD.run


@_ENGINE_OVERHEAD.table
def engine_overhead(record: Record) -> str:
    """Return the share of the bubble formula's throughput that each engine reached with layers that sleep.

    The formula lets recomputations wait like the rest. Where there are any, the law that runs them early is simulated.
    """
    grids = {"idle": record.results["grid"], "busy": record.results.get("busy_grid", [])}
    loops = {
        (machine, row["num_stages"]): row["step_seconds"]
        for machine, grid in grids.items()
        for row in grid
        if row["engine"] == HAND_WRITTEN
    }
    rows = [{**row, "machine": machine} for machine, grid in grids.items() for row in grid]

    def find_loop(row: Mapping[str, Any]) -> float | None:
        return loops.get((row["machine"], row["num_stages"])) if row["rematerialize"] == "never" else None

    def find_law(row: Mapping[str, Any]) -> float | None:
        """Simulate how long equal stages take that recompute early; None without recomputation."""
        if row["rematerialize"] != "always":
            return None
        forward, backward = record.config["forward_seconds"], record.config["backward_seconds"]
        seconds = {Kind.FORWARD: forward, Kind.RECOMPUTE: forward, Kind.BACKWARD: backward}
        schedule = gpipe(row["num_stages"], row["num_microbatches"])
        return simulate(schedule, lambda task: seconds[task.kind]).makespan_seconds

    columns = {
        "engine, recomputation": lambda row: f"{row['engine']}, {row['rematerialize']}",
        "machine": lambda row: row["machine"],
        "K": lambda row: row["num_stages"],
        "M": lambda row: row["num_microbatches"],
        "F + B as slept, ms": lambda row: f"{row['forward_seconds'] * 1e3:.2f} + {row['backward_seconds'] * 1e3:.2f}",
        "ms per step": lambda row: f"{row['step_seconds'] * 1e3:.1f}",
        "formula, ms": lambda row: f"{row['formula_seconds'] * 1e3:.1f}",
        "formula / step": lambda row: f"{row['formula_seconds'] / row['step_seconds']:.3f}",
        "recomputing early, simulated, ms": lambda row: format_value(find_law(row), ".1f", 1e3),
        "recomputing early / step": lambda row: format_value(find_law(row), ".3f", 1 / row["step_seconds"]),
        "loop / step": lambda row: format_value(find_loop(row), ".3f", 1 / row["step_seconds"]),
    }
    return write_table(rows, columns)


@ONE_STAGE_OVERHEAD.table
def one_stage_overhead(record: Record) -> str:
    """Return the time of a one-stage pipeline beside a hand-written loop."""
    results, config = record.results, record.config
    model = f"AmoebaNet-D ({config['num_layers']},{config['num_filters']})"
    setting = f"{model}, {config['batch_size']} images of {config['image_size']} px, M = {config['num_microbatches']}"
    ratios = results | {"hand_written_ratio": None, "ours_ratio": results["ratio"]}
    rows = [
        [what, f"{results[f'{name}_seconds'] * 1e3:.1f}", format_value(ratios[f"{name}_ratio"], ".3f")]
        for name, what in _ONE_STAGE.items()
    ]
    return markdown([setting, "ms per step", "relative to the loop, median of pairs"], rows)


@THREADS_UNDER_LOAD.table
def threads_under_load(record: Record) -> str:
    """Return how long a step takes with a thread per core, beside one thread, on an idle and on a busy machine."""
    num_cores, config, results = record.hardware["num_cores"], record.config, record.results
    rows = [
        [
            f"AmoebaNet-D ({config['num_layers']},{row['num_filters']})",
            row["num_busy"],
            f"{row['one_thread_seconds']:.2f}",
            *(f"{row[kind]['median']:.2f} ({row[kind]['least']:.2f} to {row[kind]['most']:.2f})" for kind in _WAITS),
        ]
        for row in results["rows"]
    ]
    header = ["model", "busy processes", "seconds per step, 1 thread", *(f"{num_cores} threads, {w}" for w in _WAITS)]
    ends = (
        f"\nSteps of {config['batch_size']} images on {num_cores} cores, {config['rounds']} rounds. The last "
        "columns are in units of one thread's step, median (least to most). Load average before: "
        f"{results['load_before']:.1f}.\n"
    )
    return markdown(header, rows) + ends


@REPLICA_WAIT.table
def replica_wait(record: Record) -> str:
    """Return how long a stage waits for gradients, with and without replicas."""
    waits = record.results["wait_seconds"]
    (alone, *_) = waits.values()
    rows = []
    for case, seconds in waits.items():
        ratios = [one / other for one, other in zip(seconds, alone, strict=True)]
        rows.append([case, f"{median(seconds) * 1e3:.1f}", f"{median(ratios):.2f}"])
    return markdown(["pipelines", "wait for gradients, ms per step", "relative to one replica, median of pairs"], rows)


@LAUNCHING_THREADS.table
def launching_threads(record: Record) -> str:
    """Return how much more often two threads, or two processes, run small layers than one thread does."""
    rows = []
    for row in record.results["rows"]:
        alone, *others = row["per_second"].values()
        ratios = [median(both / one for both, one in zip(other, alone, strict=True)) for other in others]
        rows.append([row["passes"], f"{median(alone):.1f}", *(f"{ratio:.2f}" for ratio in ratios)])
    _, *names = record.results["rows"][0]["per_second"]
    return markdown(["pass", "per second, one thread", *(f"{name} / one thread" for name in names)], rows)


@DEVICE_THREADS.table
def device_threads(record: Record) -> str:
    """Return the time of a step in one process of several GPUs, with one launching thread and one per GPU."""
    config = record.config
    one, each = record.results["seconds"].values()
    row = [
        f"AmoebaNet-D ({config['num_layers']},{config['num_filters']}), {config['image_size']} px",
        config["num_stages"],
        config["num_microbatches"],
        f"{1000 * median(one):.1f}",
        f"{median(new / old for new, old in zip(each, one, strict=True)):.2f}",
    ]
    return markdown(["model", "GPUs", "M", "ms per step, one thread", "a thread per device / one thread"], [row])


TABLES = (
    *_ENGINE_OVERHEAD.tables,
    *ONE_STAGE_OVERHEAD.tables,
    *THREADS_UNDER_LOAD.tables,
    *REPLICA_WAIT.tables,
    *LAUNCHING_THREADS.tables,
    *DEVICE_THREADS.tables,
)
