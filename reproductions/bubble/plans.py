"""Plans beside what they plan: seconds of steps, and what `pipeline=auto` chooses."""

from gpipe.records import Record
from reproductions.study import Study
from reproductions.table import markdown

PLANNED_SECONDS, AUTOMATIC_PLANS = "planned_seconds", "automatic_plans"
_PLANNED_SECONDS = Study(PLANNED_SECONDS)
_AUTOMATIC_PLANS = Study(AUTOMATIC_PLANS)


@_PLANNED_SECONDS.table
def planned_seconds(record: Record) -> str:
    """Return the planned and the measured seconds of each step."""
    rows = [
        [
            case["model"],
            str(case["num_stages"]),
            case["schedule"],
            case["mode"],
            f"{case['planned'] * 1e3:.1f}",
            f"{case['measured'] * 1e3:.1f}",
            f"{case['planned'] / case['measured'] - 1:+z.1%}",
        ]
        for case in record.results["cases"]
    ]
    header = ["model", "K", "schedule", "recompute", "planned, ms", "measured, ms", "planned / measured - 1"]
    return markdown(header, rows)


planned_seconds_run = _PLANNED_SECONDS.run()


@_AUTOMATIC_PLANS.table
def automatic_plans(record: Record) -> str:
    """Return how long pipeline=auto searched, and what it chose."""
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


automatic_plans_run = _AUTOMATIC_PLANS.run()
