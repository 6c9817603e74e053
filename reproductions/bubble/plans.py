"""Plans beside what they plan: seconds of steps, and what `pipeline=auto` chooses."""

from collections.abc import Sequence

from gpipe.records import Record
from reproductions.table import markdown, newest, not_run, provenance

PLANNED_SECONDS, AUTOMATIC_PLANS = "planned_seconds", "automatic_plans"
_PLANNED_SECONDS_PROGRAM = f"python -m experiments.{PLANNED_SECONDS}"
_AUTOMATIC_PLANS_PROGRAM = f"python -m experiments.{AUTOMATIC_PLANS}"


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
            f"{case['planned'] / case['measured'] - 1:+z.1%}",
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
