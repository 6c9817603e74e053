"""The tables that Tables 2 and 3 have in common, made from a grid of planned and one of simulated numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from gpipe.results.claims import NOT_RUN, Claim
from gpipe.results.records import Record
from gpipe.results.speed_ups import Key, Paper, grid, grid_speeds, key_of, measured_speeds, over_base
from gpipe.results.tables import markdown, not_run, provenance

PROGRAM = "experiments/table2_throughput.py"
KINDS = ("planned", "simulated")
TOLERANCE = 0.2
Models = Sequence[Mapping[str, Any]]
"""The models of a grid, with their cells."""


def beside_paper(
    records: Sequence[Record], paper: Paper, experiment: str, further: Mapping[str, Mapping[Key, float]]
) -> str:
    """Return the paper's speed-ups beside planned and simulated ones, with the largest micro-batches that fit.

    experiment: of the grid. further: columns of speeds that were measured, by their title.
    """
    columns = {}
    for kind in KINDS:
        for cut, name in (("seconds", kind), ("flops", f"{kind}, cut by FLOPs")):
            columns[name] = over_base(grid_speeds(grid(records, experiment, kind), "fits", cut), paper)
    others = [over_base(speeds, paper) for speeds in further.values()]
    rows = []
    for row in paper:
        key, expected = key_of(row), float(row["speed_up"])
        found = [column.get(key) for column in columns.values()]
        ours = [cell for value in found for cell in (ratio(value), deviation(value, expected))]
        rows.append([*names(row), row["speed_up"], *ours, *(ratio(other.get(key)) for other in others)])
    header = [name for column in columns for name in (column, "off the paper")]
    return markdown(["model", "K", "M", "paper", *header, *further], rows)


def cells_claim(records: Sequence[Record], paper: Paper, experiments: tuple[str, str], table: str) -> Claim:
    """Return how many cells of the paper's table are within 20 % of the paper's speed-up: a row of the claims.

    The cells from which the speed-ups are counted are left out. experiments: of the grid, and of the measured runs.
    table: its name in the paper.
    """
    rows = [row for row in paper if float(row["speed_up"]) != 1]
    kinds = [
        over_base(grid_speeds(grid(records, experiments[0], kind), "fits"), paper) for kind in ("simulated", "planned")
    ]
    columns = [over_base(measured_speeds(records, experiments[1], "fixed", paper), paper), *kinds]
    near = [
        sum(abs(column.get(key_of(row), 0) / float(row["speed_up"]) - 1) <= TOLERANCE for row in rows)
        for column in columns
    ]
    cells = [f"{number} of {len(rows)}" if column else "" for number, column in zip(near, columns, strict=True)]
    text = f"speed-ups within {TOLERANCE:.0%} of the paper's ({table})"
    return Claim(text, f"{len(rows)} cells", cells[0] or NOT_RUN, cells[1], cells[2])


def ratio_claim(
    records: Sequence[Record],
    paper: Paper,
    experiments: tuple[str, str],
    text: str,
    printed: str,
    cells: tuple[Key, Key],
) -> Claim:
    """Return the ratio of two cells' throughputs: a row of the claims. printed: the paper's own."""
    speeds = [
        measured_speeds(records, experiments[1], "fixed", paper),
        *(grid_speeds(grid(records, experiments[0], kind), "fits") for kind in ("simulated", "planned")),
    ]
    one, other = cells
    ours = [ratio(found[one] / found[other]) if one in found and other in found else "" for found in speeds]
    return Claim(text, printed, ours[0] or NOT_RUN, ours[1], ours[2])


def with_batch(records: Sequence[Record], paper: Paper, experiments: tuple[str, str], batch: str) -> str:
    """Return the speed-ups with "fixed" micro-batches, or "equal" mini-batches, and what was measured so.

    experiments: of the grid, and of the measured runs.
    """
    columns = [over_base(grid_speeds(grid(records, experiments[0], kind), batch), paper) for kind in KINDS]
    measured = over_base(measured_speeds(records, experiments[1], batch, paper), paper)
    rows = []
    for row in paper:
        found = [ratio(column.get(key_of(row))) for column in columns]
        rows.append([*names(row), row["speed_up"], *found, ratio(measured.get(key_of(row))) or "not run"])
    return markdown(["model", "K", "M", "paper", *KINDS, "measured"], rows)


def names(row: Mapping[str, str]) -> list[str]:
    """Return the first cells of a row of paper.csv: model, K and M."""
    return [row["title"], row["num_stages"], row["num_microbatches"]]


def grid_run(records: Sequence[Record], experiment: str) -> str:
    """Return where the newest simulation ran, and on what."""
    runs = [record for record in records if record.experiment == experiment and record.kind == "simulated"]
    return provenance(max(runs, key=lambda run: run.date, default=None), PROGRAM)


def ratio(value: float | None) -> str:
    """Write a speed-up, nothing where there is none."""
    return "" if value is None else f"{value:.2f}"


def deviation(value: float | None, paper: float) -> str:
    """Write by how much a number is off the paper's."""
    return "" if value is None else f"{round(value / paper - 1, 2) + 0.0:+.0%}"  # never -0%


def breakdown(models: Models, batch: str, cut_by: str) -> str:
    """Return where the time of each cell goes, with its micro-batches, its memory and the bubble's formula."""
    if not models:
        return not_run(PROGRAM)
    rows = []
    for model in models:
        for cell in model["cells"]:
            if (cell["batch"], cell["cut_by"]) != (batch, cut_by):
                continue
            k, m = cell["num_stages"], cell["num_microbatches"]
            gib = f"{cell['peak_bytes'] / 2**30:.1f} of {model['memory_bytes'] / 2**30:.0f}"
            shares = [f"{share:.1%}" for share in cell["shares"].values()]
            rows.append([model["model"], str(k), str(m), str(cell["microbatch_size"]), gib, *shares])
            rows[-1].append(f"{(k - 1) / (m + k - 1):.1%}")
    names = [name.replace("_", " ") for name in models[0]["cells"][0]["shares"]]
    return markdown(["model", "K", "M", "micro-batch", "GiB, planned", *names, "formula"], rows)


def partitions(models: Models, batch: str) -> str:
    """Return the cuts with the most micro-batches, and by how much the slowest stage exceeds the mean."""
    if not models:
        return not_run(PROGRAM)
    most = max(cell["num_microbatches"] for cell in models[0]["cells"])
    rows = [
        [model["model"], str(cell["num_stages"]), cell["cut_by"], _layers(cell), f"{cell['imbalance']:.1%}"]
        for model in models
        for cell in model["cells"]
        if cell["batch"] == batch and cell["num_microbatches"] == most
    ]
    return markdown(["model", "K", "cut by", "layers of each stage", "slowest stage above the mean"], rows)


def figures(planned: Models, simulated: Models) -> str:
    """Return what the paper's devices are taken to do, and the device at hand with its links."""
    if not planned or not simulated:
        return not_run(PROGRAM)
    rows = [
        [
            paper["model"],
            paper["device"],
            f"{paper['flops_per_second'] / 1e9:,.0f}",
            f"{paper['link_bytes_per_second'] / 1e9:g}",
            f"{ours['flops_per_second'] / 1e9:,.1f}",
            f"{ours['link_bytes_per_second'] / 1e9:.3g}",
            f"{paper['flops_per_second'] / ours['flops_per_second']:,.0f}",
        ]
        for paper, ours in zip(planned, simulated, strict=True)
    ]
    columns = ["GFLOP/s, planned", "link, GB/s", "GFLOP/s here, measured", "link, simulated, GB/s", "times slower"]
    return markdown(["model", "the paper's device", *columns], rows)


def _layers(cell: Mapping[str, Any]) -> str:
    return " ".join(map(str, cell["partitions"]))
