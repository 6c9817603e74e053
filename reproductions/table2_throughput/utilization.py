"""The table of how busy a GPU is with the layers of Transformer-L, from experiments/transformer_utilization.py."""

from gpipe.results.records import Record
from gpipe.results.tables import markdown, named, newest, not_run, provenance

EXPERIMENT = "transformer_utilization"
_PROGRAM = f"python experiments/{EXPERIMENT}.py, which needs a GPU"
_LEAST = 0.4  # of the peak, without recomputation and compiled


def transformer_utilization(records: list[Record]) -> str:
    """Return a row a setting: tokens a second, and the model's FLOPs as a share of the maker's peak."""
    record = newest(records, EXPERIMENT)
    if record is None:
        return not_run(_PROGRAM)
    rows = []
    for row in record.results["rows"]:
        share = row["utilization"]
        is_judged = row["compiled"] and row["rematerialize"] == "never" and share is not None
        rows.append(
            [
                row["rematerialize"],
                "yes" if row["compiled"] else "no",
                f"{1000 * row['step_seconds']:.1f}",
                f"{row['tokens_per_second']:,.0f}",
                "" if share is None else f"{share:.1%}",
                ("reached" if share >= _LEAST else "not reached") if is_judged else "",
            ]
        )
    header = ["recomputation", "compiled", "ms a step", "tokens/s", "utilisation", f"at least {_LEAST:.0%}"]
    return markdown(header, rows)


def transformer_utilization_run(records: list[Record]) -> str:
    """Return where the utilisation was measured."""
    return provenance(newest(records, EXPERIMENT), _PROGRAM)


TABLES = named(transformer_utilization, transformer_utilization_run)
