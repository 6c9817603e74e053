"""The tables of the paper's Table 3: the speed-up with links over PCI-E."""

from collections.abc import Sequence

from gpipe.records import Record
from reproductions.claims import Claim
from reproductions.paper_scale import other_settings
from reproductions.speed_ups import (
    SLOW_LINKS,
    beside_paper,
    breakdown,
    cells_claim,
    figures,
    find_grid,
    grid_run,
    held_against,
    partitions,
    with_batch,
)
from reproductions.table import Paper

GRID = "table3_slow_links_grid"
PAPER_SCALE = SLOW_LINKS


def table3(records: Sequence[Record], paper: Paper) -> str:
    """Return the paper's speed-ups beside ours, with the largest micro-batches that fit."""
    return beside_paper(records, paper, GRID, {})


def table3_other_settings(records: Sequence[Record], paper: Paper) -> str:
    """Return the runs with the paper-scale name but other settings."""
    return other_settings(records, [PAPER_SCALE], held_against(paper))


def claims(records: Sequence[Record], paper: Paper) -> list[Claim]:
    """Return how many of our speed-ups are near the paper's."""
    return [cells_claim(records, paper, (GRID, PAPER_SCALE), "Table 3")]


def table3_fixed(records: Sequence[Record], paper: Paper) -> str:
    """Return the speed-ups with micro-batches of 4 examples, of the grid and of measured runs."""
    return with_batch(records, paper, (GRID, PAPER_SCALE), "fixed")


def table3_breakdown(records: Sequence[Record]) -> str:
    """Return where the time of each simulated cell goes."""
    return breakdown(find_grid(records, GRID, "simulated"), "fits", "seconds")


def table3_partitions(records: Sequence[Record]) -> str:
    """Return the partitions of the planned and the simulated cells, and their quality."""
    return partitions(records, GRID, "fits")


def table3_figures(records: Sequence[Record]) -> str:
    """Return the devices and links of the paper and of the simulation."""
    return figures(find_grid(records, GRID, "planned"), find_grid(records, GRID, "simulated"))


def table3_run(records: Sequence[Record]) -> str:
    """Return the provenance of the simulated columns."""
    return grid_run(records, GRID, "simulated")


def table3_planned_run(records: Sequence[Record]) -> str:
    """Return the provenance of the planned columns."""
    return grid_run(records, GRID, "planned")


TABLES = (
    table3,
    table3_other_settings,
    table3_fixed,
    table3_breakdown,
    table3_partitions,
    table3_figures,
    table3_run,
    table3_planned_run,
)
