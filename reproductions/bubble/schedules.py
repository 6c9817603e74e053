"""The schedules beside each other: simulated and measured time, planned memory."""

from gpipe.results.records import Record
from gpipe.results.tables import markdown, named, newest, not_run, provenance


def schedule_simulation(records: list[Record]) -> str:
    """Return how long each schedule's steps took with layers that sleep, beside what the simulator says."""
    record = newest(records, "schedule_simulation")
    if record is None:
        return not_run("schedule_simulation")
    rows = [
        [
            f"{row['schedule']}, {row['rematerialize']}",
            str(row["num_devices"]),
            str(row["stages_per_device"]),
            str(row["num_microbatches"]),
            f"{row['simulated_seconds'] * 1e3:.1f}",
            f"{row['makespan_seconds'] * 1e3:.1f}",
            f"{row['makespan_seconds'] / row['simulated_seconds']:.3f}",
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
        "whole step, measured, ms",
    ]
    return markdown(header, rows)


def schedule_simulation_run(records: list[Record]) -> str:
    """Return the command, date and hardware of the newest run."""
    return provenance(newest(records, "schedule_simulation"), "schedule_simulation")


def schedule_memory(records: list[Record]) -> str:
    """Return each schedule's planned bubble, time and memory, a row a schedule and mode of re-materialisation."""
    record = newest(records, "schedule_memory")
    if record is None:
        return not_run("schedule_memory")
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
        "planned s a step",
        "GiB of activations, fullest device",
        "emptiest device",
        "GiB, peak",
    ]
    return markdown(header, rows)


def schedule_memory_run(records: list[Record]) -> str:
    """Return the command, date and hardware of the newest plan."""
    return provenance(newest(records, "schedule_memory"), "schedule_memory")


TABLES = named(schedule_simulation, schedule_simulation_run, schedule_memory, schedule_memory_run)
