"""The schedules beside each other: their steps, simulated and measured, what a split backward costs, and memory."""

from gpipe.records import Record
from reproductions.study import Study
from reproductions.table import markdown

ZERO_BUBBLE, SPLIT_COST = "zero_bubble", "split_cost"
_SCHEDULE_SIMULATION = Study("schedule_simulation")
_ZERO_BUBBLE = Study(ZERO_BUBBLE)
_SPLIT_COST = Study(SPLIT_COST)
_SCHEDULE_MEMORY = Study("schedule_memory")


@_SCHEDULE_SIMULATION.table
def schedule_simulation(record: Record) -> str:
    """Return the time of each schedule's steps with layers that sleep, beside the simulator's."""
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
        "engine's time per task, measured before, ms",
        "engine's time per task, in the steps, ms",
        "whole step, measured, ms",
    ]
    return markdown(header, rows)


schedule_simulation_run = _SCHEDULE_SIMULATION.run()


@_ZERO_BUBBLE.table
def zero_bubble(record: Record) -> str:
    """Return the time of each split schedule's steps with layers that sleep, beside torch's."""
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


@_ZERO_BUBBLE.table
def zero_bubble_exact(record: Record) -> str:
    """Return by how much gradients in two processes differ from those in one, with dropout."""
    rows = [
        [
            f"{row['engine']}: {row['schedule']}",
            f"{row['largest_difference']:.1%}" if row["largest_difference"] else "0",
        ]
        for row in record.results["exactness"]
    ]
    return markdown(["schedule", "largest difference of a gradient / largest gradient"], rows)


@_ZERO_BUBBLE.table
def zero_bubble_models(record: Record) -> str:
    """Return the time of real models' steps under each schedule, on two cores."""
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


zero_bubble_run = _ZERO_BUBBLE.run()


@_SPLIT_COST.table
def split_cost(record: Record) -> str:
    """Return what both parts of a backward take beside a whole one."""
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


split_cost_run = _SPLIT_COST.run()


@_SCHEDULE_MEMORY.table
def schedule_memory(record: Record) -> str:
    """Return each schedule's planned bubble, time and memory, one row per schedule and mode of re-materialisation."""
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
        "planned bubble and imbalance",
        "planned s per step",
        "GiB of activations, fullest device",
        "emptiest device",
        "GiB, peak",
    ]
    return markdown(header, rows)


schedule_memory_run = _SCHEDULE_MEMORY.run()
