"""The paper's claim about the bubble, beside what was measured, simulated and planned at M = 4K."""

from collections.abc import Mapping, Sequence
from typing import Any

from gpipe.results.claims import NO_TEST, NOT_RUN, Claim
from gpipe.results.records import Record
from gpipe.results.speed_ups import grid
from gpipe.results.table2 import GRID
from gpipe.results.tables import Paper, newest

_CELL = {"num_stages": 8, "num_microbatches": 32}


def claims(records: Sequence[Record], paper: Paper) -> list[Claim]:  # noqa: ARG001 - every page's claims take both
    """Return the share of a step in which the stages of K = 8, M = 32 wait, with recomputation.

    Measured: what the step of equal, sleeping layers takes above the work of a stage, the engine's own cost included.
    Simulated and planned: the bubble of Transformer-48 in Table 2's cell, the imbalance of its stages apart.
    """
    k, m = _CELL.values()
    measured = newest(list(records), "engine_overhead")
    rows = [] if measured is None else [row for row in measured.results["grid"] if _is_cell(row)]
    ours = [_waiting(row) for row in rows if (row["engine"], row["rematerialize"]) == ("ours", "always")]
    others = {
        kind: [
            f"{cell['shares']['bubble']:.1%}"
            for model in grid(records, GRID, kind)
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
            f"{ours[0]:.1%}" if ours else NOT_RUN,
            "".join(others["simulated"]),
            "; ".join([*others["planned"], f"(K-1)/(M+K-1) is {(k - 1) / (m + k - 1):.1%}"]),
            NO_TEST,
        )
    ]


def _is_cell(row: Mapping[str, Any]) -> bool:
    return all(row[name] == value for name, value in _CELL.items())


def _waiting(row: Mapping[str, Any]) -> float:
    """Return the share of a measured step in which a stage does not forward, recompute or go backward."""
    work: float = row["num_microbatches"] * (2 * row["forward_seconds"] + row["backward_seconds"])
    step: float = row["step_seconds"]
    return 1 - work / step
