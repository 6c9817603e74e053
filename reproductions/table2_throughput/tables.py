"""The tables of the paper's Table 2: how training speeds up with stages and micro-batches."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from gpipe.pipeline.timeline import Timeline
from gpipe.records import Record
from reproductions.claims import Claim
from reproductions.speed_ups import (
    EQUAL_BATCH_SIZE,
    SpeedUps,
    cell_of,
    compute_law,
    divide_by_base,
    key_of,
    measured_runs,
    median_speed,
    names,
    ratio,
)
from reproductions.study import Study
from reproductions.table import Paper, format_value, markdown, newest, not_run, provenance, write_table
from reproductions.table2_throughput.peers import PEERS

GRID = "table2_throughput_grid"
PAPER_SCALE = "table2_throughput"
SPEED_UPS = SpeedUps("table2", GRID, PAPER_SCALE)
LAPTOP = "table2_throughput_laptop"
NOISE = 0.05  # by how much a measured speed-up may exceed the law, whose B = 2F is an estimate
_LAPTOP_PROGRAMS = {
    "fixed": "train.py -m +experiment=table2_throughput_laptop",
    "equal": f"train.py -m +experiment=table2_throughput_laptop trainer.batch_size={EQUAL_BATCH_SIZE}",
}
_LOSS_PROGRAM = "python -m experiments.loss_cost"
_LEAST_UTILIZATION = 0.4  # of the peak, without recomputation and compiled
STEP_TIMELINE = Study("step_timeline")
TRANSFORMER_UTILIZATION = Study(
    "transformer_utilization", "python -m experiments.transformer_utilization, which needs a GPU"
)
LOSS_BYTES, LOSS_SECONDS = Study("loss_bytes", _LOSS_PROGRAM), Study("loss_seconds", _LOSS_PROGRAM)
WEIGHT_COPIES, DEVICE_WORK = Study("weight_copies"), Study("device_work")


def table2(records: Sequence[Record], paper: Paper) -> str:
    """Return the paper's speed-ups beside ours, with the largest micro-batches that fit, and torchgpipe's."""
    theirs = {key_of(row): float(speed) for row in paper if (speed := row["torchgpipe_samples_per_second"])}
    return SPEED_UPS.beside_paper(records, paper, {"torchgpipe, measured": theirs})


def claims(records: Sequence[Record], paper: Paper) -> list[Claim]:
    """Return the speed-ups that the paper highlights."""
    transformer, amoebanet = "Transformer-48", "AmoebaNet-D (18,256)"
    printed = {key_of(row): row["speed_up"] for row in paper}
    headline = "3.5 times faster with 4 times the accelerators: Transformer-48, K = 8 over K = 2 at M = 32 (Table 2)"
    cells = (transformer, 8, 32), (transformer, 2, 32)
    found = [SPEED_UPS.claim_ratio(records, paper, headline, "3.5", cells)]
    for model in (amoebanet, transformer):
        text = f"{model}, K = 8, M = 32 over K = 2, M = 1 (Table 2)"
        cells = (model, 8, 32), (model, 2, 1)
        found.append(SPEED_UPS.claim_ratio(records, paper, text, printed[cells[0]], cells))
    return [*found, SPEED_UPS.claim_cells(records, paper, "Table 2")]


def table2_law(records: Sequence[Record], paper: Paper) -> str:  # noqa: ARG001 - the paper's numbers alone
    """Return the paper's speed-ups beside what equal stages allow, if an example takes as long in every cell.

    The bubble formula is (M+K-1)/(KM). With recomputation while a stage waits it is (M+K-1) F + M (R+B) + (K-1) B: with
    B = 2F and R = F an example takes (4M+3K-3)/(KM) forwards. The last column is the M that this would need.
    """
    bubble = divide_by_base({(t, k, m): k * m / (m + k - 1) for t, k, m in map(key_of, paper)}, paper)
    speeds = {(t, k, m): compute_law(k, m) for t, k, m in map(key_of, paper)}
    early = divide_by_base(speeds, paper)
    rows = []
    for row in paper:
        key, found = key_of(row), float(row["speed_up"])
        k = key[1]
        speed = found * speeds[key] / early[key]
        needed = f"{speed * (3 * k - 3) / (4 * (k - speed)):.1f}" if k > speed else "none"
        law = [ratio(bubble[key]), ratio(early[key]), f"{found / early[key]:.2f}", needed]
        rows.append([*names(row), row["speed_up"], *law])
    header = ["model", "K", "M", "paper", "bubble formula", "recomputing early", "paper / recomputing early", "its M"]
    return markdown(header, rows)


def table2_laptop(records: Sequence[Record]) -> str:
    """Return the small models' measured speeds where the mini-batch grows with M."""
    return _laptop(records, "fixed")


def table2_laptop_equal(records: Sequence[Record]) -> str:
    """Return the small models' measured speeds with the same mini-batch in every cell."""
    return _laptop(records, "equal")


def table2_laptop_run(records: Sequence[Record]) -> str:
    """Return the provenance of the newest of the runs whose mini-batch grows with M."""
    return _laptop_run(records, "fixed")


def table2_laptop_equal_run(records: Sequence[Record]) -> str:
    """Return the provenance of the newest of the runs with the same mini-batch in every cell."""
    return _laptop_run(records, "equal")


def _laptop_run(records: Sequence[Record], batch: str) -> str:
    runs = (run for cell in measured_runs(records, LAPTOP, batch).values() for run in cell)
    return provenance(newest(runs), _LAPTOP_PROGRAMS[batch])


def _laptop(records: Sequence[Record], batch: str) -> str:
    cells = measured_runs(records, LAPTOP, batch)
    if not cells:
        return not_run(_LAPTOP_PROGRAMS[batch])
    speeds = {cell: median_speed(runs) or 0.0 for cell, runs in cells.items()}
    rows = []
    for cell, runs in cells.items():
        family, k, m = cell
        over_base, over_one = (
            speeds[cell] / base if base else None for base in (speeds.get((family, 2, 1)), speeds.get((family, 1, m)))
        )
        bubbles = [bubble for run in runs if (bubble := run.results.get("bubble")) is not None]
        rows.append(
            [
                name_model(runs[0]),
                k,
                m,
                runs[0].config["trainer"]["batch_size"],
                _spread(runs),
                ratio(over_base),
                _refuse_impossible(over_one, runs, cells.get((family, 1, m), ())),
                f"{median(bubbles):.1%}" if bubbles else "",
            ]
        )
    over = ["over K = 2, M = 1", "over K = 1, same M"]
    return markdown(["model", "K", "M", "mini-batch", "examples/s", *over, "bubble"], rows)


def _spread(runs: Sequence[Record]) -> str:
    """Write the examples per second of a cell: the median, and the least and the most of several runs."""
    speeds = [run.examples_per_second or 0.0 for run in runs]
    spread = f" ({min(speeds):.1f} to {max(speeds):.1f} in {len(speeds)} runs)" if len(speeds) > 1 else ""
    return f"{median(speeds):.1f}{spread}"


def _refuse_impossible(speed_up: float | None, runs: Sequence[Record], alone: Sequence[Record]) -> str:
    """Write a speed-up over one stage; if both were measured several times, with its least and its most.

    A single one that the law forbids is refused, because one of the two runs was disturbed.
    """
    if speed_up is not None and runs is not alone and min(len(runs), len(alone)) > 1:
        speeds, ones = ([run.examples_per_second or 0.0 for run in each] for each in (runs, alone))
        return f"{ratio(speed_up)} ({min(speeds) / max(ones):.2f} to {max(speeds) / min(ones):.2f})"
    pipeline = runs[0].config["pipeline"]
    most = compute_law(pipeline["num_stages"], pipeline["num_microbatches"])
    is_impossible = speed_up is not None and speed_up > (1 + NOISE) * most
    if is_impossible and pipeline.get("rematerialize", "always") == "always":
        return f"refused: {ratio(speed_up)}, but at most {ratio(most)} is possible"
    return ratio(speed_up)


def name_model(run: Record) -> str:
    """Name a small model."""
    model = run.config["model"]
    if model["family"] == "amoebanet":
        return f"AmoebaNet-{model['variant'].upper()} ({model['num_layers']},{model['num_filters']})"
    return f"Transformer-{model['num_layers']}, {model['model_size']} wide"


def step_timeline(records: Sequence[Record]) -> str:
    """Return how long the tasks of a real step took, and the share of it in which a stage waited, for each model."""
    runs = [record for record in records if record.experiment == STEP_TIMELINE.experiment]
    last = {name_model(run): run for run in sorted(runs, key=lambda run: run.date)}
    rows = []
    for name, run in sorted(last.items()):
        step = Timeline.from_json(run.results["events"], run.results["num_devices"])
        _, k, m = cell_of(run)
        layers = " ".join(map(str, run.results["partitions"]))
        rows.append([name, k, m, layers, f"{step.makespan_seconds * 1e3:.0f}", f"{step.bubble:.1%}"])
    header = ["model", "K", "M", "layers of each stage", "first to last task, ms", "bubble"]
    return markdown(header, rows) if rows else STEP_TIMELINE.run(records)


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
    table2,
    table2_law,
    *SPEED_UPS.tables,
    table2_laptop,
    table2_laptop_run,
    table2_laptop_equal,
    table2_laptop_equal_run,
    step_timeline,
    *STEP_TIMELINE.tables,
    *TRANSFORMER_UTILIZATION.tables,
    *LOSS_BYTES.tables,
    *LOSS_SECONDS.tables,
    *WEIGHT_COPIES.tables,
    *DEVICE_WORK.tables,
    *PEERS.tables,
)
