"""What a step costs: how much of a GPU's peak it uses, and what losses, copies of weights and waits take."""

from collections.abc import Mapping
from typing import Any

from gpipe.records import Record
from reproductions.study import Study
from reproductions.table import format_value, markdown, write_table

_LOSS_PROGRAM = "python -m experiments.loss_cost"
_LEAST_UTILIZATION = 0.4  # of the peak, without recomputation and compiled
TRANSFORMER_UTILIZATION = Study(
    "transformer_utilization", "python -m experiments.transformer_utilization, which needs a GPU"
)
LOSS_BYTES, LOSS_SECONDS = Study("loss_bytes", _LOSS_PROGRAM), Study("loss_seconds", _LOSS_PROGRAM)
WEIGHT_COPIES, DEVICE_WORK = Study("weight_copies"), Study("device_work")


@TRANSFORMER_UTILIZATION.table
def transformer_utilization(record: Record) -> str:
    """Return one row per setting: tokens per second, and the model's FLOPs as a share of the maker's peak."""

    def judge(row: Mapping[str, Any]) -> str:
        if row["utilization"] is None or not row["compiled"] or row["rematerialize"] != "never":
            return ""
        return "reached" if row["utilization"] >= _LEAST_UTILIZATION else "not reached"

    columns = {
        "recomputation": lambda row: row["rematerialize"],
        "compiled": lambda row: "yes" if row["compiled"] else "no",
        "ms per step": lambda row: f"{1000 * row['step_seconds']:.1f}",
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        "utilisation": lambda row: format_value(row["utilization"], ".1%"),
        f"at least {_LEAST_UTILIZATION:.0%}": judge,
    }
    return write_table(record.results["rows"], columns)


@LOSS_BYTES.table
def loss_bytes(record: Record) -> str:
    """Return what a loss over a large vocabulary moves and allocates, in one pass and by single operations."""
    rows = []
    for row in record.results["rows"]:
        passes = row["forward"], row["backward"]
        moved, operations = (sum(each[name] for each in passes) for name in ("bytes_moved", "operations"))
        peaks = (f"{each['peak_bytes'] / 1e9:.2f}" for each in passes)
        sizes = f"{row['logits_bytes'] / 1e9:.2f}", f"{moved / 1e9:.1f}"
        rows.append([row["what"], row["dtype"], row["way"], *sizes, *peaks, operations])
    header = ["micro-batch of", "logits in", "computed", "logits, GB", "planned GB moved"]
    return markdown([*header, "planned GB in forward", "planned GB in backward", "operations"], rows)


@LOSS_SECONDS.table
def loss_seconds(record: Record) -> str:
    """Return what the same takes on one core."""
    columns = {
        "micro-batch of": lambda row: row["what"],
        "logits in": lambda row: row["dtype"],
        "one by one, ms": lambda row: f"{1e3 * row['one_by_one_seconds']:.0f}",
        "one pass / one by one": lambda row: f"{row['one_pass_of_it']:.2f}",
    }
    return write_table(record.results["rows"], columns)


@WEIGHT_COPIES.table
def weight_copies(record: Record) -> str:
    """Return what steps under autocast convert, move, hold and send: a copy of each weight per use or per step."""
    sizes = "converted_bytes_moved", "bytes_moved", "peak_bytes", "sent_bytes"
    rows = []
    for row in record.results["rows"]:
        conversions, moved, peak, sent = (f"{row[name] / 1e6:,.1f}" for name in sizes)
        counts = f"{row['conversions']:,}", conversions, f"{row['operations']:,}", moved, peak, sent
        rows.append([row["model"], row["rematerialize"], row["way"], *counts])
    header = ["model", "re-materialisation", "way", "weight conversions", "MB moved by them", "operations"]
    return markdown([*header, "MB moved by all", "peak MB besides weights", "MB over the boundary"], rows)


@DEVICE_WORK.table
def device_work(record: Record) -> str:
    """Return what steps and losses ask of GPUs and their host, as they were and as they are."""
    names = "host_synchronisations", "stream_waits", "nccl_operations", "averages_before_gradients"
    rows = []
    for row in record.results["rows"]:
        launches = f"{row.get('launches', row['kernels']):,}"  # records from before CUDA graphs have none
        # The simulation does not know which memory graphs would share.
        sizes = (format_value(row[name], ",.1f", 1e-6) for name in ("bytes_moved", "peak_bytes"))
        counts = (f"{row[name]:,}" for name in names)
        rows.append([row["what"], row["way"], f"{row['kernels']:,}", launches, *sizes, *counts])
    header = ["counted", "way", "kernels", "launches", "MB moved by kernels", "peak MB besides weights"]
    waits = ["host waits", "stream waits", "NCCL operations", "averages that a sent gradient waits for"]
    return markdown(header + waits, rows)


TABLES = (
    *TRANSFORMER_UTILIZATION.tables,
    *LOSS_BYTES.tables,
    *LOSS_SECONDS.tables,
    *WEIGHT_COPIES.tables,
    *DEVICE_WORK.tables,
)
