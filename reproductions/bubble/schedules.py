"""The schedules beside each other: their steps, simulated and measured, what a split backward costs, and memory."""

from gpipe.records import Record
from reproductions.study import Study
from reproductions.table import format_value, write_table

ZERO_BUBBLE = "zero_bubble"
SCHEDULE_SIMULATION, SPLIT_COST = Study("schedule_simulation"), Study("split_cost")
SCHEDULE_MEMORY = Study("schedule_memory")
_ZERO_BUBBLE = Study(ZERO_BUBBLE)
zero_bubble_run = _ZERO_BUBBLE.run


@SCHEDULE_SIMULATION.table
def schedule_simulation(record: Record) -> str:
    """Return the time of each schedule's steps with layers that sleep, beside the simulator's."""
    added = f"{record.results['task_seconds'] * 1e3:.2f}"
    columns = {
        "schedule, recomputation": lambda row: f"{row['schedule']}, {row['rematerialize']}",
        "P": lambda row: row["num_devices"],
        "K / P": lambda row: row["stages_per_device"],
        "M": lambda row: row["num_microbatches"],
        "first to last task, simulated, ms": lambda row: f"{row['simulated_seconds'] * 1e3:.1f}",
        "measured, ms": lambda row: f"{row['makespan_seconds'] * 1e3:.1f}",
        "measured / simulated": lambda row: f"{row['makespan_seconds'] / row['simulated_seconds']:.3f}",
        "engine's time per task, measured before, ms": lambda _: added,
        "engine's time per task, in the steps, ms": lambda row: f"{row['added_seconds'] * 1e3:.2f}",
        "whole step, measured, ms": lambda row: f"{row['step_seconds'] * 1e3:.1f}",
    }
    return write_table(record.results["grid"], columns)


@_ZERO_BUBBLE.table
def zero_bubble(record: Record) -> str:
    """Return the time of each split schedule's steps with layers that sleep, beside torch's."""
    grid = record.results["grid"]
    baseline = {
        (row["num_devices"], row["num_microbatches"]): row["step_seconds"]
        for row in grid
        if (row["engine"], row["schedule"]) == ("ours", "1f1b")
    }
    columns = {
        "schedule": lambda row: f"{row['engine']}: {row['schedule']}",
        "P": lambda row: row["num_devices"],
        "M": lambda row: row["num_microbatches"],
        "ms per step": lambda row: f"{row['step_seconds'] * 1e3:.1f}",
        "simulated, ms": lambda row: format_value(row["simulated_seconds"], ".1f", 1e3),
        "step / simulated": lambda row: format_value(
            row["simulated_seconds"] and row["step_seconds"] / row["simulated_seconds"], ".3f"
        ),
        "step / work": lambda row: f"{row['step_seconds'] / row['work_seconds']:.3f}",
        "1F1B / step": lambda row: f"{baseline[row['num_devices'], row['num_microbatches']] / row['step_seconds']:.2f}",
    }
    return write_table(grid, columns)


@_ZERO_BUBBLE.table
def zero_bubble_exact(record: Record) -> str:
    """Return by how much gradients in two processes differ from those in one, with dropout."""
    columns = {
        "schedule": lambda row: f"{row['engine']}: {row['schedule']}",
        "largest difference of a gradient / largest gradient": lambda row: (
            f"{row['largest_difference']:.1%}" if row["largest_difference"] else "0"
        ),
    }
    return write_table(record.results["exactness"], columns)


@_ZERO_BUBBLE.table
def zero_bubble_models(record: Record) -> str:
    """Return the time of real models' steps under each schedule, on two cores."""
    models = record.results["models"]
    baseline = {row["model"]: row["step_seconds"] for row in models if row["schedule"] == "1f1b"}
    columns = {
        "model": lambda row: row["model"],
        "schedule": lambda row: row["schedule"],
        "layers of each stage": lambda row: row["partitions"],
        "ms per step": lambda row: f"{row['step_seconds'] * 1e3:.1f}",
        "1F1B / step": lambda row: f"{baseline[row['model']] / row['step_seconds']:.3f}",
    }
    return write_table(models, columns)


@SPLIT_COST.table
def split_cost(record: Record) -> str:
    """Return what both parts of a backward take beside a whole one."""
    columns = {
        "layer": lambda row: row["name"],
        "whole backward, ms": lambda row: f"{row['whole_seconds'] * 1e3:.1f}",
        "both parts / whole": lambda row: f"{row['parts_of_whole']:.3f}",
        "first part / both": lambda row: f"{row['first_part']:.2f}",
    }
    return write_table(record.results["layers"], columns)


@SCHEDULE_MEMORY.table
def schedule_memory(record: Record) -> str:
    """Return each schedule's planned bubble, time and memory, one row per schedule and mode of re-materialisation."""
    columns = {
        "schedule, recomputation": lambda row: f"{row['schedule']}, {row['rematerialize']}",
        "planned bubble and imbalance": lambda row: f"{row['bubble']:.1%}",
        "planned s per step": lambda row: f"{row['step_seconds']:.2f}",
        "GiB of activations, fullest device": lambda row: f"{max(row['activation_bytes']) / 2**30:.2f}",
        "emptiest device": lambda row: f"{min(row['activation_bytes']) / 2**30:.2f}",
        "GiB, peak": lambda row: f"{max(row['peak_bytes']) / 2**30:.1f}",
    }
    return write_table(record.results["rows"], columns)


TABLES = (*SCHEDULE_SIMULATION.tables, *_ZERO_BUBBLE.tables, *SPLIT_COST.tables, *SCHEDULE_MEMORY.tables)
