"""The paper's claim about the bubble, beside our measured, simulated and planned numbers at M = 4K."""

from collections.abc import Mapping, Sequence
from typing import Any

from gpipe.records import Record
from reproductions.bubble import overheads, plans, saves, schedules
from reproductions.claims import NO_TEST, NOT_RUN, Claim
from reproductions.speed_ups import cell_of, find_grid
from reproductions.table import Paper, markdown, newest, not_run, provenance
from reproductions.table2_throughput.tables import GRID

_CELL = {"num_stages": 8, "num_microbatches": 32}
BUBBLE = "bubble"
_BUBBLE_PROGRAM = "make gpu, on a machine with several GPUs"


def claims(records: Sequence[Record], paper: Paper) -> list[Claim]:  # noqa: ARG001 - every page's claims take both
    """Return the share of a step in which the stages of K = 8, M = 32 wait, with recomputation.

    Measured: the time of a step of equal, sleeping layers beyond the work of a stage, including the engine's own cost;
    of the newest record, and the least and most of all records.
    Simulated and planned: the bubble of Transformer-48 in Table 2's cell, without the imbalance of its stages.
    """
    k, m = _CELL.values()
    others = {
        kind: [
            f"{model['model']}: {cell['shares']['bubble']:.1%} without imbalance"
            for model in find_grid(records, GRID, kind)
            for cell in model["cells"]
            if _is_cell(cell) and (cell["batch"], cell["cut_by"]) == ("fits", "seconds")
            if model["model"] == "Transformer-48"
        ]
        for kind in ("simulated", "planned")
    }
    return [
        Claim(
            f"the bubble is negligible when M >= 4K (section 2), here K = {k}, M = {m}",
            "negligible",
            _describe_waiting(records),
            "".join(others["simulated"]),
            "; ".join([*others["planned"], f"(K-1)/(M+K-1) is {(k - 1) / (m + k - 1):.1%}"]),
            NO_TEST,
        )
    ]


def _describe_waiting(records: Sequence[Record]) -> str:
    """Write the share of the newest measured step in which a stage does not work, and how far the records differ."""
    studies = sorted((each for each in records if each.experiment == "engine_overhead"), key=lambda each: each.date)
    shares = [
        1 - row["num_microbatches"] * (2 * row["forward_seconds"] + row["backward_seconds"]) / row["step_seconds"]
        for study in studies
        for row in study.results["grid"]
        if _is_cell(row) and (row["engine"], row["rematerialize"]) == ("ours", "always")
    ]
    if not shares:
        return NOT_RUN
    spread = f" ({min(shares):.1%} to {max(shares):.1%} in {len(shares)} records)" if len(shares) > 1 else ""
    return f"layers that sleep: {shares[-1]:.1%}{spread}"


def _is_cell(row: Mapping[str, Any]) -> bool:
    return all(row[name] == value for name, value in _CELL.items())


def bubble_on_gpus(records: Sequence[Record]) -> str:
    """Return the bubble of training steps on several GPUs, beside the formula's."""
    runs = sorted(_find_runs(records), key=lambda run: (run.config["model"]["num_layers"], *cell_of(run)[1:]))
    if not runs:
        return not_run(_BUBBLE_PROGRAM)
    rows = []
    for run in runs:
        _, k, m = cell_of(run)
        formula = f"{(k - 1) / (m + k - 1):.1%}"
        rows.append([f"Transformer-{run.config['model']['num_layers']}", str(k), str(m), formula])
        rows[-1].append(f"{run.results['bubble']:.1%}")
    return markdown(["model", "K", "M", "(K-1)/(M+K-1)", "bubble, measured"], rows)


def bubble_on_gpus_run(records: Sequence[Record]) -> str:
    """Return the provenance of the newest of these steps."""
    return provenance(newest(_find_runs(records)), _BUBBLE_PROGRAM)


def _find_runs(records: Sequence[Record]) -> list[Record]:
    return [
        run
        for run in records
        if run.experiment == BUBBLE and run.kind == "measured" and run.results.get("bubble") is not None
    ]


TABLES = (
    *overheads.TABLES,
    *schedules.TABLES,
    *plans.TABLES,
    *saves.TABLES,
    bubble_on_gpus,
    bubble_on_gpus_run,
)
