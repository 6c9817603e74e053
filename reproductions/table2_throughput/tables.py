"""The tables of the paper's Table 2: how training speeds up with stages and micro-batches."""

from collections.abc import Sequence
from statistics import median

from gpipe.pipeline.timeline import Timeline
from gpipe.records import Record
from reproductions.claims import Claim
from reproductions.speed_up_tables import SpeedUps, names, ratio
from reproductions.speed_ups import (
    EQUAL_BATCH_SIZE,
    cell_of,
    compute_law,
    divide_by_base,
    key_of,
    measured_runs,
    median_speed,
)
from reproductions.study import Study
from reproductions.table import Paper, markdown, newest, not_run, provenance
from reproductions.table2_throughput import step_costs
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
STEP_TIMELINE = Study("step_timeline")


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
    *step_costs.TABLES,
    *PEERS.tables,
)
