"""Speed-ups over K stages and M micro-batches, of a planned or simulated grid and of measured runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from gpipe.records import Record
from reproductions.claims import NOT_RUN, Claim
from reproductions.paper_scale import Differences, other_settings, paper_scale
from reproductions.paper_scale import differences as settings_that_differ
from reproductions.table import (
    Paper,
    Table,
    format_value,
    markdown,
    name_table,
    newest,
    not_run,
    provenance,
    write_table,
)

Key = tuple[str, int, int]
"""(a model's title, K, M)"""

# Of conf/experiment/table2_throughput.yaml: micro-batches if mini-batches grow with M, or equal mini-batches.
MICROBATCH_SIZE = 4
EQUAL_BATCH_SIZE = 128
_EXPERIMENTS = {"amoebanet": "table2_amoebanet_d", "transformer_lm": "table2_transformer_lm"}
SLOW_LINKS = "table3_slow_links"
# What its page adds to the commands of Table 2: the paper's P100s have no units for bfloat16.
_SLOW_LINKS = {"amoebanet": "model.num_filters=128", "transformer_lm": "model.num_layers=24"}


def key_of(row: Mapping[str, str]) -> Key:
    """Return the cell of a row of paper.csv."""
    return row["title"], int(row["num_stages"]), int(row["num_microbatches"])


def divide_by_base(speeds: Mapping[Key, float], paper: Paper) -> dict[Key, float]:
    """Return speeds over that of the paper's base, for each model that has it."""
    bases: dict[str, Key] = {}
    for row in paper:
        bases.setdefault(row["title"], key_of(row))
    return {key: speed / speeds[bases[key[0]]] for key, speed in speeds.items() if bases.get(key[0]) in speeds}


def find_grid(records: Iterable[Record], experiment: str, kind: str) -> list[dict[str, Any]]:
    """Return the models of the newest grid of "planned" or "simulated" numbers, if there is one."""
    found = _find_grid_record(records, experiment, kind)
    return [] if found is None else list(found.results["models"])


def _find_grid_record(records: Iterable[Record], experiment: str, kind: str) -> Record | None:
    return newest((record for record in records if record.kind == kind), experiment)


def grid_speeds(models: Iterable[Mapping[str, Any]], batch: str, cut_by: str = "seconds") -> dict[Key, float]:
    """Return the examples per second of the cells with this choice of micro-batches and balance of partitions."""
    return {
        (model["model"], cell["num_stages"], cell["num_microbatches"]): cell["examples_per_second"]
        for model in models
        for cell in model["cells"]
        if (cell["batch"], cell["cut_by"]) == (batch, cut_by)
    }


def measured_runs(records: Iterable[Record], experiment: str, batch: str) -> dict[Key, list[Record]]:
    """Return the runs of each cell on the newest machine, the newest of each seed: seeds repeat a measurement.

    They have "fixed" micro-batches or "equal" mini-batches. A run counts for both if both have the same mini-batch.
    """
    runs = [run for run in records if run.kind == "measured" and run.experiment == experiment]
    runs = sorted((run for run in runs if _has_batch(run, batch)), key=lambda run: run.date)
    last = {(cell_of(run), run.seed): run for run in runs if run.hardware == runs[-1].hardware}
    cells: dict[Key, list[Record]] = {}
    for (cell, _), run in sorted(last.items(), key=lambda item: item[0]):
        cells.setdefault(cell, []).append(run)
    return cells


def median_speed(runs: Iterable[Record]) -> float | None:
    """Return the median of the runs' examples per second, None if no run has measured them."""
    speeds = [speed for run in runs if (speed := run.examples_per_second) is not None]
    return median(speeds) if speeds else None


def compute_law(num_stages: int, num_microbatches: int) -> float:
    """Return the speed-up over one stage that K equal stages allow, recomputing while they wait.

    A step takes (M+K-1) F + M (R+B) + (K-1) B. With R = F and B = 2F that is (4M+3K-3) F / K per stage.
    """
    k, m = num_stages, num_microbatches
    return 4 * k * m / (4 * m + 3 * k - 3)


def measured_speeds(records: Iterable[Record], experiment: str, batch: str, paper: Paper) -> dict[Key, float]:
    """Return the measured examples per second of the runs with the paper-scale settings, under the paper's titles."""
    titles = {row["model"]: row["title"] for row in paper}
    speeds: dict[Key, float] = {}
    counting = paper_scale(records, [experiment], held_against(paper))
    for (family, num_stages, num_microbatches), runs in measured_runs(counting, experiment, batch).items():
        if (speed := median_speed(runs)) is not None:
            speeds[titles[family], num_stages, num_microbatches] = speed
    return speeds


def held_against(paper: Paper) -> Differences:
    """Return what compares a run with the paper-scale one of its cell, with micro-batches of 4 or equal mini-batches.

    A run of no cell of the paper is compared with the first one of its model.
    """
    cells: dict[str, list[tuple[int, int]]] = {}
    for row in paper:
        cells.setdefault(row["model"], []).append((int(row["num_stages"]), int(row["num_microbatches"])))

    def differences(run: Record) -> list[str]:
        family, *cell = cell_of(run)
        if family not in cells:
            return [f"model.family: {family} (paper scale: {' or '.join(cells)})"]
        num_stages, num_microbatches = tuple(cell) if tuple(cell) in cells[family] else cells[family][0]
        command = [f"+experiment={_EXPERIMENTS[family]}"]
        command += [f"pipeline.num_stages={num_stages}", f"pipeline.num_microbatches={num_microbatches}"]
        if run.experiment == SLOW_LINKS:
            command += [f"name={SLOW_LINKS}", _SLOW_LINKS[family], "trainer.autocast=none"]
        if _has_batch(run, "equal"):
            command.append(f"trainer.batch_size={EQUAL_BATCH_SIZE}")
        return settings_that_differ(run, command, launched_alike=True)

    return differences


def _has_batch(run: Record, batch: str) -> bool:
    size, num_microbatches = run.config["trainer"]["batch_size"], run.config["pipeline"]["num_microbatches"]
    expected: int = MICROBATCH_SIZE * num_microbatches if batch == "fixed" else EQUAL_BATCH_SIZE
    return bool(size == expected)


def cell_of(run: Record) -> Key:
    """Return the cell of a run; its model is the family's name."""
    pipeline = run.config["pipeline"]
    return run.config["model"]["family"], pipeline["num_stages"], pipeline["num_microbatches"]


PROGRAM = "python -m experiments.table2_throughput"
KINDS = ("planned", "simulated")
CUTS = {"seconds": "cut by seconds", "flops": "cut by FLOPs"}
TOLERANCE = 0.2


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
        return provenance(_find_grid_record(records, self.grid, "simulated"), PROGRAM)

    def planned_run(self, records: Sequence[Record]) -> str:
        """Return the provenance of the planned columns."""
        return provenance(_find_grid_record(records, self.grid, "planned"), f"{PROGRAM} --plan-only")

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


def count_near(speed_ups: Mapping[Key, float], paper: Paper) -> str:
    """Say how many of the compared numbers are within 20 % of the paper's; nothing where there is no speed-up."""
    rows = compared_rows(paper)
    near = sum(abs(speed_ups.get(key_of(row), 0) / float(row["speed_up"]) - 1) <= TOLERANCE for row in rows)
    return f"{near} of {len(rows)}" if speed_ups else ""


def compared_rows(paper: Paper) -> list[Mapping[str, str]]:
    """Return the rows to compare: not those that are the base of the speed-ups, which are 1 by definition."""
    return [row for row in paper if float(row["speed_up"]) != 1]


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
