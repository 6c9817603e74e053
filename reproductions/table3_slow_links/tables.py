"""The tables of the paper's Table 3: the speed-up with links over PCI-E."""

from collections.abc import Sequence

from gpipe.records import Record
from reproductions.claims import Claim
from reproductions.speed_up_tables import SpeedUps
from reproductions.speed_ups import SLOW_LINKS
from reproductions.table import Paper

GRID = "table3_slow_links_grid"
SPEED_UPS = SpeedUps("table3", GRID, SLOW_LINKS)


def table3(records: Sequence[Record], paper: Paper) -> str:
    """Return the paper's speed-ups beside ours, with the largest micro-batches that fit."""
    return SPEED_UPS.beside_paper(records, paper, {})


def claims(records: Sequence[Record], paper: Paper) -> list[Claim]:
    """Return how many of our speed-ups are near the paper's."""
    return [SPEED_UPS.claim_cells(records, paper, "Table 3")]


TABLES = (table3, *SPEED_UPS.tables)
