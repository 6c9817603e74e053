"""The tables that the paper's Tables 2 and 3 have in common: speed-ups of a grid and of measured runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe.records import Record
from reproductions.claims import NOT_RUN, Claim
from reproductions.paper_scale import other_settings
from reproductions.speed_ups import (
    TOLERANCE,
    Key,
    compared_rows,
    count_near,
    divide_by_base,
    find_grid,
    find_grid_record,
    grid_speeds,
    held_against,
    key_of,
    measured_speeds,
)
from reproductions.table import Paper, Table, format_value, markdown, name_table, not_run, provenance, write_table

PROGRAM = "python -m experiments.table2_throughput"
KINDS = ("planned", "simulated")
CUTS = {"seconds": "cut by seconds", "flops": "cut by FLOPs"}


@dataclass(frozen=True)
class SpeedUps:
    """The tables that the paper's Tables 2 and 3 have in common.

    Attributes:
        name: what the tables' names begin with.
        grid: the experiment of the planned and simulated numbers.
        runs: the experiment of the measured runs.
    """

    name: str
    grid: str
    runs: str

    @property
    def tables(self) -> list[Table]:
        """Those that need nothing but records, and the paper."""
        shared = (
            self.other_settings, self.fixed, self.equal, self.breakdown, self.planned_breakdown, self.partitions,
            self.figures, self.run, self.planned_run,
        )  # fmt: skip
        return [name_table(f"{self.name}_{table.__name__}", table) for table in shared]

    def beside_paper(self, records: Sequence[Record], paper: Paper, further: Mapping[str, Mapping[Key, float]]) -> str:
        """Return the paper's speed-ups beside planned and simulated ones, with the largest micro-batches that fit.

        `further` has columns of measured speeds by title.
        """
        columns = {}
        for kind in KINDS:
            for cut, name in (("seconds", kind), ("flops", f"{kind}, cut by FLOPs")):
                columns[name] = self._compute_speed_ups(records, paper, kind, "fits", cut)
        others = [divide_by_base(speeds, paper) for speeds in further.values()]
        rows = []
        for row in paper:
            key, expected = key_of(row), float(row["speed_up"])
            found = [column.get(key) for column in columns.values()]
            ours = [cell for value in found for cell in (ratio(value), deviation(value, expected))]
            rows.append([*names(row), row["speed_up"], *ours, *(ratio(other.get(key)) for other in others)])
        header = [name for column in columns for name in (column, "vs. paper")]
        return markdown(["model", "K", "M", "paper", *header, *further], rows)

    def other_settings(self, records: Sequence[Record], paper: Paper) -> str:
        """Return the runs with the paper-scale name but other settings."""
        return other_settings(records, [self.runs], held_against(paper))

    def fixed(self, records: Sequence[Record], paper: Paper) -> str:
        """Return the speed-ups where every micro-batch has 4 examples, so that the mini-batch grows with M."""
        return self._with_batch(records, paper, "fixed")

    def equal(self, records: Sequence[Record], paper: Paper) -> str:
        """Return the speed-ups where every cell has the same mini-batch."""
        return self._with_batch(records, paper, "equal")

    def _with_batch(self, records: Sequence[Record], paper: Paper, batch: str) -> str:
        """Return the speed-ups of the grid and of measured runs."""
        columns = [self._compute_speed_ups(records, paper, kind, batch) for kind in KINDS]
        measured = divide_by_base(measured_speeds(records, self.runs, batch, paper), paper)
        rows = []
        for row in paper:
            found = [ratio(column.get(key_of(row))) for column in columns]
            rows.append([*names(row), row["speed_up"], *found, ratio(measured.get(key_of(row))) or NOT_RUN])
        return markdown(["model", "K", "M", "paper", *KINDS, "measured"], rows)

    def breakdown(self, records: Sequence[Record]) -> str:
        """Return where the time of each simulated cell goes."""
        return _break_down(find_grid(records, self.grid, "simulated"))

    def planned_breakdown(self, records: Sequence[Record]) -> str:
        """Return where the time of each planned cell goes."""
        return _break_down(find_grid(records, self.grid, "planned"))

    def partitions(self, records: Sequence[Record]) -> str:
        """Return the cuts with the most micro-batches, and by how much the slowest stage exceeds the mean."""
        grids = {kind: _find_largest_cells(find_grid(records, self.grid, kind)) for kind in KINDS}
        places = list(dict.fromkeys(place for cells in grids.values() for place in cells))
        if not places:
            return not_run(PROGRAM)
        rows = [
            [*place, *(text for cells in grids.values() for text in _describe_cut(cells.get(place)))]
            for place in places
        ]
        columns = [
            f"{what}, {kind}" for kind in KINDS for what in ("layers of each stage", "slowest stage above the mean")
        ]
        return markdown(["model", "K", "cut by", *columns], rows)

    def figures(self, records: Sequence[Record]) -> str:
        """Return the assumed figures of the paper's devices, and those of the measuring device and its links."""
        planned, simulated = (find_grid(records, self.grid, kind) for kind in KINDS)
        if not planned or not simulated:
            return not_run(PROGRAM)
        columns: dict[str, Callable[[Any], object]] = {
            "model": lambda both: both[0]["model"],
            "the paper's device": lambda both: both[0]["device"],
            "GFLOP/s, planned": lambda both: f"{both[0]['flops_per_second'] / 1e9:,.0f}",
            "link, GB/s": lambda both: f"{both[0]['link_bytes_per_second'] / 1e9:g}",
            "GFLOP/s here, measured": lambda both: f"{both[1]['flops_per_second'] / 1e9:,.1f}",
            "link, simulated, GB/s": lambda both: f"{both[1]['link_bytes_per_second'] / 1e9:.3g}",
            "times slower": lambda both: f"{both[0]['flops_per_second'] / both[1]['flops_per_second']:,.0f}",
        }
        return write_table(zip(planned, simulated, strict=True), columns)

    def run(self, records: Sequence[Record]) -> str:
        """Return the provenance of the simulated columns."""
        return provenance(find_grid_record(records, self.grid, "simulated"), PROGRAM)

    def planned_run(self, records: Sequence[Record]) -> str:
        """Return the provenance of the planned columns."""
        return provenance(find_grid_record(records, self.grid, "planned"), f"{PROGRAM} --plan-only")

    def claim_cells(self, records: Sequence[Record], paper: Paper, table: str) -> Claim:
        """Return how many numbers of the paper's table are within 20 % of the paper's speed-up: a row of the claims."""

        def count(speeds: Mapping[Key, float]) -> str:
            return count_near(divide_by_base(speeds, paper), paper)

        text = f"speed-ups within {TOLERANCE:.0%} of the paper's ({table})"
        return self._claim(records, paper, text, f"{len(compared_rows(paper))} numbers", count)

    def claim_ratio(
        self, records: Sequence[Record], paper: Paper, text: str, printed: str, cells: tuple[Key, Key]
    ) -> Claim:
        """Return the ratio of two cells' throughputs: a row of the claims; `printed` is the paper's."""

        def divide(speeds: Mapping[Key, float]) -> str:
            one, other = (speeds.get(cell) for cell in cells)
            return ratio(one / other) if one and other else ""

        return self._claim(records, paper, text, printed, divide)

    def _claim(
        self,
        records: Sequence[Record],
        paper: Paper,
        text: str,
        printed: str,
        describe: Callable[[Mapping[Key, float]], str],
    ) -> Claim:
        """Return what is said of the speeds: the measured ones, and those of each kind with each cut."""
        found = {
            kind: {cut: describe(grid_speeds(find_grid(records, self.grid, kind), "fits", cut)) for cut in CUTS}
            for kind in KINDS
        }
        named = {
            kind: "; ".join(f"{CUTS[cut]}: {said}" for cut, said in by_cut.items() if said)
            for kind, by_cut in found.items()
        }
        measured = describe(measured_speeds(records, self.runs, "fixed", paper))
        return Claim(text, printed, measured or NOT_RUN, named["simulated"], named["planned"])

    def _compute_speed_ups(
        self, records: Sequence[Record], paper: Paper, kind: str, batch: str, cut_by: str = "seconds"
    ) -> dict[Key, float]:
        return divide_by_base(grid_speeds(find_grid(records, self.grid, kind), batch, cut_by), paper)


def names(row: Mapping[str, str]) -> list[str]:
    """Return the first cells of a row of paper.csv: model, K and M."""
    return [row["title"], row["num_stages"], row["num_microbatches"]]


def ratio(value: float | None) -> str:
    """Write a speed-up, or nothing for None."""
    return format_value(value, ".2f")


def deviation(value: float | None, paper: float) -> str:
    """Write the relative difference from the paper's number, or nothing for None."""
    return "" if value is None else f"{value / paper - 1:+z.0%}"


def _break_down(models: Sequence[Mapping[str, Any]]) -> str:
    """Return the shares of each cell's time, with its micro-batches, its memory and the bubble's formula."""
    if not models:
        return not_run(PROGRAM)
    rows = []
    for model in models:
        for cell in model["cells"]:
            if (cell["batch"], cell["cut_by"]) != ("fits", "seconds"):
                continue
            k, m = cell["num_stages"], cell["num_microbatches"]
            gib = f"{cell['peak_bytes'] / 2**30:.1f} of {model['memory_bytes'] / 2**30:.0f}"
            shares = [f"{share:.1%}" for share in cell["shares"].values()]
            rows.append([model["model"], k, m, cell["microbatch_size"], gib, *shares, f"{(k - 1) / (m + k - 1):.1%}"])
    shares = [name.replace("_", " ") for name in models[0]["cells"][0]["shares"]]
    return markdown(["model", "K", "M", "micro-batch", "GiB, planned", *shares, "formula"], rows)


def _find_largest_cells(models: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, str], Mapping[str, Any]]:
    """Return the cells with the most micro-batches that fit, by model, K and cut."""
    most = max((cell["num_microbatches"] for model in models for cell in model["cells"]), default=0)
    return {
        (model["model"], cell["num_stages"], cell["cut_by"]): cell
        for model in models
        for cell in model["cells"]
        if (cell["batch"], cell["num_microbatches"]) == ("fits", most)
    }


def _describe_cut(cell: Mapping[str, Any] | None) -> list[str]:
    return ["", ""] if cell is None else [" ".join(map(str, cell["partitions"])), f"{cell['imbalance']:.1%}"]
