"""The paper's claim about the bubble, beside our measured, simulated and planned numbers at M = 4K."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from gpipe.records import Record
from reproductions.claims import NO_TEST, NOT_RUN, Claim
from reproductions.speed_ups import cell_of, find_grid
from reproductions.table import Paper, markdown, newest, not_run, provenance
from reproductions.table2_throughput.tables import GRID

_CELL = {"num_stages": 8, "num_microbatches": 32}
CHECKPOINT_COST = "checkpoint_cost"
ZERO_BUBBLE, SPLIT_COST = "zero_bubble", "split_cost"
BUBBLE = "bubble"
_BUBBLE_PROGRAM = "make gpu, on a machine with several GPUs"
REPLICA_WAIT, PLANNED_SECONDS = "replica_wait", "planned_seconds"
AUTOMATIC_PLANS, LAUNCHING_THREADS = "automatic_plans", "launching_threads"
_AUTOMATIC_PLANS_PROGRAM = f"python -m experiments.{AUTOMATIC_PLANS}"
_PLANNED_SECONDS_PROGRAM = f"python -m experiments.{PLANNED_SECONDS}"
_REPLICA_WAIT_PROGRAM = f"python -m experiments.{REPLICA_WAIT}"
_LAUNCHING_THREADS_PROGRAM = f"python -m experiments.{LAUNCHING_THREADS}"
_SPLIT_COST_PROGRAM = f"python -m experiments.{SPLIT_COST}"
_ZERO_BUBBLE_PROGRAM = f"python -m experiments.{ZERO_BUBBLE}"
OURS, DCP_SYNCHRONOUS, DCP_ASYNCHRONOUS = "ours", "torch.distributed.checkpoint, save", "the same, async_save"
_CHECKPOINT_PROGRAM = f"python -m experiments.{CHECKPOINT_COST}"
_CHECKPOINT_ON_GPUS = f"{_CHECKPOINT_PROGRAM} --device cuda"
_MOST_STILL = 0.1  # of the time of the synchronous save
_WAITS = ("spinning", "sleeping")  # how threads wait for each other


def claims(records: Sequence[Record], paper: Paper) -> list[Claim]:  # noqa: ARG001 - every page's claims take both
    """Return the share of a step in which the stages of K = 8, M = 32 wait, with recomputation.

    Measured: the time of a step of equal, sleeping layers beyond the work of a stage, including the engine's own cost.
    Simulated and planned: the bubble of Transformer-48 in Table 2's cell, without the imbalance of its stages.
    """
    k, m = _CELL.values()
    measured = newest(records, "engine_overhead")
    rows = [] if measured is None else [row for row in measured.results["grid"] if _is_cell(row)]
    ours = [_compute_waiting(row) for row in rows if (row["engine"], row["rematerialize"]) == ("ours", "always")]
    others = {
        kind: [
            f"{cell['shares']['bubble']:.1%}"
            for model in find_grid(records, GRID, kind)
            for cell in model["cells"]
            if _is_cell(cell) and (cell["batch"], cell["cut_by"]) == ("fits", "seconds")
            if model["model"] == "Transformer-48"
        ]
        for kind in ("simulated", "planned")
    }
    return [
        Claim(
            f"the bubble is negligible when M >= 4K (section 2), here K = {k}, M = {m}",
            "negligible",
            f"{ours[0]:.1%}" if ours else NOT_RUN,
            "".join(others["simulated"]),
            "; ".join([*others["planned"], f"(K-1)/(M+K-1) is {(k - 1) / (m + k - 1):.1%}"]),
            NO_TEST,
        )
    ]


def _is_cell(row: Mapping[str, Any]) -> bool:
    return all(row[name] == value for name, value in _CELL.items())


def _compute_waiting(row: Mapping[str, Any]) -> float:
    """Return the share of a measured step in which a stage does not work."""
    work: float = row["num_microbatches"] * (2 * row["forward_seconds"] + row["backward_seconds"])
    step: float = row["step_seconds"]
    return 1 - work / step


HAND_WRITTEN = "hand-written loop"


def engine_overhead(records: Sequence[Record]) -> str:
    """Return the share of the bubble formula's throughput that each engine reached with layers that sleep."""
    record = newest(records, "engine_overhead")
    if record is None:
        return not_run("python -m experiments.engine_overhead")
    grids = {"idle": record.results["grid"], "busy": record.results.get("busy_grid", [])}
    loops = {
        (machine, row["num_stages"]): row["step_seconds"]
        for machine, grid in grids.items()
        for row in grid
        if row["engine"] == HAND_WRITTEN
    }
    rows = [
        [
            f"{row['engine']}, {row['rematerialize']}",
            machine,
            str(row["num_stages"]),
            str(row["num_microbatches"]),
            f"{row['forward_seconds'] * 1e3:.2f} + {row['backward_seconds'] * 1e3:.2f}",
            f"{row['step_seconds'] * 1e3:.1f}",
            f"{row['formula_seconds'] * 1e3:.1f}",
            f"{row['formula_seconds'] / row['step_seconds']:.3f}",
            f"{loop / row['step_seconds']:.3f}"
            if row["rematerialize"] == "never" and (loop := loops.get((machine, row["num_stages"]))) is not None
            else "",
        ]
        for machine, grid in grids.items()
        for row in grid
    ]
    header = ["engine, recomputation", "machine", "K", "M", "F + B as slept, ms", "ms per step", "formula, ms"]
    return markdown([*header, "formula / step", "loop / step"], rows)


def engine_overhead_run(records: Sequence[Record]) -> str:
    """Return the command, date and hardware of the newest run."""
    return provenance(newest(records, "engine_overhead"), "python -m experiments.engine_overhead")


_ONE_STAGE = {
    "hand_written": "hand-written loop",
    "ours": "ours, K = 1",
    "checkpoint": "hand-written loop, torch.utils.checkpoint",
    "checkpoint_reentrant": "the same, reentrant: its first forward may run other kernels",
    "ours_rematerialized": "ours, K = 1, rematerialize='always'",
}


def one_stage_overhead(records: Sequence[Record]) -> str:
    """Return the time of a one-stage pipeline beside a hand-written loop."""
    record = newest(records, "one_stage_overhead")
    if record is None:
        return not_run("python -m experiments.one_stage_overhead")
    results, config = record.results, record.config
    model = f"AmoebaNet-D ({config['num_layers']},{config['num_filters']})"
    setting = f"{model}, {config['batch_size']} images of {config['image_size']} px, M = {config['num_microbatches']}"
    ratios = results | {"hand_written_ratio": None, "ours_ratio": results["ratio"]}
    rows = [
        [
            what,
            f"{results[f'{name}_seconds'] * 1e3:.1f}",
            "" if (ratio := ratios[f"{name}_ratio"]) is None else f"{ratio:.3f}",
        ]
        for name, what in _ONE_STAGE.items()
        if f"{name}_seconds" in results  # older records have no re-materialisation
    ]
    return markdown([setting, "ms per step", "of the loop, median of pairs"], rows)


def threads_under_load(records: Sequence[Record]) -> str:
    """Return how long a step takes with a thread per core, beside one thread, on an idle and on a busy machine."""
    record = newest(records, "threads_under_load")
    if record is None:
        return not_run("python -m experiments.threads_under_load")
    num_cores, config, results = record.hardware["num_cores"], record.config, record.results
    rows = [
        [
            f"AmoebaNet-D ({config['num_layers']},{row['num_filters']})",
            str(row["num_busy"]),
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


def schedule_simulation(records: Sequence[Record]) -> str:
    """Return the time of each schedule's steps with layers that sleep, beside the simulator's."""
    record = newest(records, "schedule_simulation")
    if record is None:
        return not_run("python -m experiments.schedule_simulation")
    rows = [
        [
            f"{row['schedule']}, {row['rematerialize']}",
            str(row["num_devices"]),
            str(row["stages_per_device"]),
            str(row["num_microbatches"]),
            f"{row['simulated_seconds'] * 1e3:.1f}",
            f"{row['makespan_seconds'] * 1e3:.1f}",
            f"{row['makespan_seconds'] / row['simulated_seconds']:.3f}",
            f"{record.results['task_seconds'] * 1e3:.2f}",
            f"{row['added_seconds'] * 1e3:.2f}",
            f"{row['step_seconds'] * 1e3:.1f}",
        ]
        for row in record.results["grid"]
    ]
    header = [
        "schedule, recomputation",
        "P",
        "K / P",
        "M",
        "first to last task, simulated, ms",
        "measured, ms",
        "measured / simulated",
        "a task beside its sleep, before, ms",
        "in the steps, ms",
        "whole step, measured, ms",
    ]
    return markdown(header, rows)


def schedule_simulation_run(records: Sequence[Record]) -> str:
    """Return the command, date and hardware of the newest run."""
    return provenance(newest(records, "schedule_simulation"), "python -m experiments.schedule_simulation")


def zero_bubble(records: Sequence[Record]) -> str:
    """Return the time of each split schedule's steps with layers that sleep, beside torch's."""
    record = newest(records, ZERO_BUBBLE)
    if record is None:
        return not_run(_ZERO_BUBBLE_PROGRAM)
    grid = record.results["grid"]
    baseline = {
        (row["num_devices"], row["num_microbatches"]): row["step_seconds"]
        for row in grid
        if (row["engine"], row["schedule"]) == ("ours", "1f1b")
    }
    rows = []
    for row in grid:
        simulated = row["simulated_seconds"]
        rows.append(
            [
                f"{row['engine']}: {row['schedule']}",
                str(row["num_devices"]),
                str(row["num_microbatches"]),
                f"{row['step_seconds'] * 1e3:.1f}",
                "" if simulated is None else f"{simulated * 1e3:.1f}",
                "" if simulated is None else f"{row['step_seconds'] / simulated:.3f}",
                f"{row['step_seconds'] / row['work_seconds']:.3f}",
                f"{baseline[row['num_devices'], row['num_microbatches']] / row['step_seconds']:.2f}",
            ]
        )
    header = [
        "schedule",
        "P",
        "M",
        "ms per step",
        "simulated, ms",
        "step / simulated",
        "step / work",
        "1F1B / step",
    ]
    return markdown(header, rows)


def zero_bubble_exact(records: Sequence[Record]) -> str:
    """Return by how much gradients in two processes differ from those in one, with dropout."""
    record = newest(records, ZERO_BUBBLE)
    if record is None:
        return not_run(_ZERO_BUBBLE_PROGRAM)
    rows = [
        [
            f"{row['engine']}: {row['schedule']}",
            f"{row['largest_difference']:.1%}" if row["largest_difference"] else "0",
        ]
        for row in record.results["exactness"]
    ]
    return markdown(["schedule", "largest difference of a gradient, of the largest gradient"], rows)


def zero_bubble_models(records: Sequence[Record]) -> str:
    """Return the time of real models' steps under each schedule, on two cores."""
    record = newest(records, ZERO_BUBBLE)
    if record is None:
        return not_run(_ZERO_BUBBLE_PROGRAM)
    models = record.results["models"]
    baseline = {row["model"]: row["step_seconds"] for row in models if row["schedule"] == "1f1b"}
    rows = [
        [
            row["model"],
            row["schedule"],
            str(row["partitions"]),
            f"{row['step_seconds'] * 1e3:.1f}",
            f"{baseline[row['model']] / row['step_seconds']:.3f}",
        ]
        for row in models
    ]
    return markdown(["model", "schedule", "layers of each stage", "ms per step", "1F1B / step"], rows)


def zero_bubble_run(records: Sequence[Record]) -> str:
    """Return the command, date and hardware of the newest run."""
    return provenance(newest(records, ZERO_BUBBLE), _ZERO_BUBBLE_PROGRAM)


def planned_seconds(records: Sequence[Record]) -> str:
    """Return the planned and the measured seconds of each step."""
    record = newest(records, PLANNED_SECONDS)
    if record is None:
        return not_run(_PLANNED_SECONDS_PROGRAM)
    rows = [
        [
            case["model"],
            str(case["num_stages"]),
            case["schedule"],
            case["mode"],
            f"{case['planned'] * 1e3:.1f}",
            f"{case['measured'] * 1e3:.1f}",
            f"{case['planned'] / case['measured'] - 1:+.1%}",
        ]
        for case in record.results["cases"]
    ]
    header = ["model", "K", "schedule", "recompute", "planned, ms", "measured, ms", "planned / measured - 1"]
    return markdown(header, rows)


def planned_seconds_run(records: Sequence[Record]) -> str:
    """Return the command, date and hardware of the newest run."""
    return provenance(newest(records, PLANNED_SECONDS), _PLANNED_SECONDS_PROGRAM)


def automatic_plans(records: Sequence[Record]) -> str:
    """Return how long pipeline=auto searched, and what it chose."""
    record = newest(records, AUTOMATIC_PLANS)
    if record is None:
        return not_run(_AUTOMATIC_PLANS_PROGRAM)
    rows = [
        [
            row["model"],
            f"{row['seconds']:.1f}",
            row["shape"],
            f"{row['schedule']}, M = {row['num_microbatches']}, recompute {row['recompute']}",
            f"{row['step_seconds']:.3g}",
            row["peak"],
            row["bubble"],
        ]
        for row in record.results["rows"]
    ]
    return markdown(["model", "search, s", "R x K", "chosen", "step, s, planned", "peak", "bubble"], rows)


def automatic_plans_run(records: Sequence[Record]) -> str:
    """Return the command, date and hardware of the newest run."""
    return provenance(newest(records, AUTOMATIC_PLANS), _AUTOMATIC_PLANS_PROGRAM)


def split_cost(records: Sequence[Record]) -> str:
    """Return what both parts of a backward take beside a whole one."""
    record = newest(records, SPLIT_COST)
    if record is None:
        return not_run(_SPLIT_COST_PROGRAM)
    rows = [
        [
            row["name"],
            f"{row['whole_seconds'] * 1e3:.1f}",
            f"{row['parts_of_whole']:.3f}",
            f"{row['first_part']:.2f}",
        ]
        for row in record.results["layers"]
    ]
    return markdown(["layer", "whole backward, ms", "both parts / whole", "first part / both"], rows)


def split_cost_run(records: Sequence[Record]) -> str:
    """Return the command, date and hardware of the newest run."""
    return provenance(newest(records, SPLIT_COST), _SPLIT_COST_PROGRAM)


def replica_wait(records: Sequence[Record]) -> str:
    """Return how long a stage waits for gradients, with and without replicas."""
    record = newest(records, REPLICA_WAIT)
    if record is None:
        return not_run(_REPLICA_WAIT_PROGRAM)
    waits = record.results["wait_seconds"]
    (alone, *_) = waits.values()
    rows = []
    for case, seconds in waits.items():
        ratios = [one / other for one, other in zip(seconds, alone, strict=True)]
        rows.append([case, f"{median(seconds) * 1e3:.1f}", f"{median(ratios):.2f}"])
    return markdown(["pipelines", "wait for gradients, ms per step", "of that of one replica, median of pairs"], rows)


def replica_wait_run(records: Sequence[Record]) -> str:
    """Return the command, date and hardware of the newest run."""
    return provenance(newest(records, REPLICA_WAIT), _REPLICA_WAIT_PROGRAM)


def launching_threads(records: Sequence[Record]) -> str:
    """Return how much more often two threads, or two processes, run small layers than one thread does."""
    record = newest(records, LAUNCHING_THREADS)
    if record is None:
        return not_run(_LAUNCHING_THREADS_PROGRAM)
    rows = []
    for row in record.results["rows"]:
        alone, *others = row["per_second"].values()
        ratios = [median(both / one for both, one in zip(other, alone, strict=True)) for other in others]
        rows.append([row["passes"], f"{median(alone):.1f}", *(f"{ratio:.2f}" for ratio in ratios)])
    _, *names = record.results["rows"][0]["per_second"]
    return markdown(["pass", "per second, one thread", *(f"{name}, of that" for name in names)], rows)


def launching_threads_run(records: Sequence[Record]) -> str:
    """Return the command, date and hardware of the newest run."""
    return provenance(newest(records, LAUNCHING_THREADS), _LAUNCHING_THREADS_PROGRAM)


def schedule_memory(records: Sequence[Record]) -> str:
    """Return each schedule's planned bubble, time and memory, one row per schedule and mode of re-materialisation."""
    record = newest(records, "schedule_memory")
    if record is None:
        return not_run("python -m experiments.schedule_memory")
    rows = [
        [
            f"{row['schedule']}, {row['rematerialize']}",
            f"{row['bubble']:.1%}",
            f"{row['step_seconds']:.2f}",
            f"{max(row['activation_bytes']) / 2**30:.2f}",
            f"{min(row['activation_bytes']) / 2**30:.2f}",
            f"{max(row['peak_bytes']) / 2**30:.1f}",
        ]
        for row in record.results["rows"]
    ]
    header = [
        "schedule, recomputation",
        "planned bubble",
        "planned s per step",
        "GiB of activations, fullest device",
        "emptiest device",
        "GiB, peak",
    ]
    return markdown(header, rows)


def schedule_memory_run(records: Sequence[Record]) -> str:
    """Return the command, date and hardware of the newest plan."""
    return provenance(newest(records, "schedule_memory"), "python -m experiments.schedule_memory")


def checkpoint_cost(records: Sequence[Record]) -> str:
    """Return one row per way to save: how long training stood still, and when the files were on the disk."""
    return _checkpoint_cost(_newest_save(records, on_gpus=False), _CHECKPOINT_PROGRAM)


def checkpoint_cost_on_gpus(records: Sequence[Record]) -> str:
    """Return the same where the tensors are on GPUs."""
    return _checkpoint_cost(_newest_save(records, on_gpus=True), _CHECKPOINT_ON_GPUS)


def _newest_save(records: Sequence[Record], *, on_gpus: bool) -> Record | None:
    """Return the newest record of saves from the memory of GPUs, or from the hosts'."""
    return newest([record for record in records if bool(record.hardware["gpus"]) == on_gpus], CHECKPOINT_COST)


def _checkpoint_cost(record: Record | None, program: str) -> str:
    if record is None:
        return not_run(program)
    found = {row["saver"]: row for row in record.results["rows"]}
    synchronous = found[DCP_SYNCHRONOUS]["still_seconds"]
    rows = []
    for name, row in found.items():
        share = row["still_seconds"] / synchronous
        rows.append(
            [
                name,
                f"{1000 * row['still_seconds']:.0f}",
                f"{share:.1%}",
                f"{row['total_seconds']:.2f}",
                f"{row['bytes_per_second'] / 1e6:.0f}",
                ("reached" if share <= _MOST_STILL else "not reached") if name == OURS else "",
            ]
        )
    config = record.config
    count = config["num_processes"]
    title = f"{config['num_bytes'] / 1e6:.0f} MB, {count} {'process' if count == 1 else 'processes'}"
    header = [title, "training stands still, ms", "of the synchronous save", "until on the disk, s", "MB/s"]
    return markdown([*header, f"at most {_MOST_STILL:.0%}"], rows)


def bubble_on_gpus(records: Sequence[Record]) -> str:
    """Return the bubble of training steps on several GPUs, beside the formula's."""
    runs = sorted(_find_runs(records), key=lambda run: (run.config["model"]["num_layers"], *cell_of(run)[1:]))
    if not runs:
        return not_run(_BUBBLE_PROGRAM)
    rows = []
    for run in runs:
        _, k, m = cell_of(run)
        formula = f"{(k - 1) / (m + k - 1):.1%}"
        rows.append([f"Transformer-{run.config['model']['num_layers']}", str(k), str(m), formula])
        rows[-1].append(f"{run.results['bubble']:.1%}")
    return markdown(["model", "K", "M", "(K-1)/(M+K-1)", "bubble, measured"], rows)


def bubble_on_gpus_run(records: Sequence[Record]) -> str:
    """Return the provenance of the newest of these steps."""
    return provenance(max(_find_runs(records), key=lambda run: run.date, default=None), _BUBBLE_PROGRAM)


def _find_runs(records: Sequence[Record]) -> list[Record]:
    return [
        run
        for run in records
        if run.experiment == BUBBLE and run.kind == "measured" and run.results.get("bubble") is not None
    ]


def checkpoint_cost_run(records: Sequence[Record]) -> str:
    """Return the provenance of the measured cost."""
    return provenance(_newest_save(records, on_gpus=False), _CHECKPOINT_PROGRAM)


def checkpoint_cost_on_gpus_run(records: Sequence[Record]) -> str:
    """Return the provenance of the cost on GPUs."""
    return provenance(_newest_save(records, on_gpus=True), _CHECKPOINT_ON_GPUS)


TABLES = (
    engine_overhead,
    engine_overhead_run,
    one_stage_overhead,
    threads_under_load,
    schedule_simulation,
    schedule_simulation_run,
    zero_bubble,
    zero_bubble_exact,
    zero_bubble_models,
    zero_bubble_run,
    split_cost,
    split_cost_run,
    planned_seconds,
    planned_seconds_run,
    automatic_plans,
    automatic_plans_run,
    replica_wait,
    replica_wait_run,
    launching_threads,
    launching_threads_run,
    schedule_memory,
    schedule_memory_run,
    checkpoint_cost,
    checkpoint_cost_run,
    checkpoint_cost_on_gpus,
    checkpoint_cost_on_gpus_run,
    bubble_on_gpus,
    bubble_on_gpus_run,
)
