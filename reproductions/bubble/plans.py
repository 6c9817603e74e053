"""Plans beside what they plan: seconds of steps, and what `pipeline=auto` chooses."""

from gpipe.records import Record
from reproductions.study import Study
from reproductions.table import write_table

PLANNED_SECONDS, AUTOMATIC_PLANS = Study("planned_seconds"), Study("automatic_plans")


@PLANNED_SECONDS.table
def planned_seconds(record: Record) -> str:
    """Return the planned and the measured seconds of each step."""
    columns = {
        "model": lambda case: case["model"],
        "K": lambda case: case["num_stages"],
        "schedule": lambda case: case["schedule"],
        "recompute": lambda case: case["mode"],
        "planned, ms": lambda case: f"{case['planned'] * 1e3:.1f}",
        "measured, ms": lambda case: f"{case['measured'] * 1e3:.1f}",
        "planned / measured - 1": lambda case: f"{case['planned'] / case['measured'] - 1:+z.1%}",
    }
    return write_table(record.results["cases"], columns)


@AUTOMATIC_PLANS.table
def automatic_plans(record: Record) -> str:
    """Return how long pipeline=auto searched, and what it chose."""
    columns = {
        "model": lambda row: row["model"],
        "search, s": lambda row: f"{row['seconds']:.1f}",
        "R x K": lambda row: row["shape"],
        "chosen": lambda row: f"{row['schedule']}, M = {row['num_microbatches']}, recompute {row['recompute']}",
        "step, s, planned": lambda row: f"{row['step_seconds']:.3g}",
        "peak": lambda row: row["peak"],
        "bubble": lambda row: row["bubble"],
    }
    return write_table(record.results["rows"], columns)


TABLES = (*PLANNED_SECONDS.tables, *AUTOMATIC_PLANS.tables)
