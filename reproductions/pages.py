"""Turn the records of the reproductions into the tables of the READMEs.

python -m gpipe.results.reproduction                                       render every README anew
python -m gpipe.results.reproduction add runs/<name>/<date> reproductions/<claim>     add a run's record first
"""

import csv
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpipe.results import (
    bubble,
    checkpoint_cost,
    depth,
    faults,
    figure3,
    peers,
    planned_memory,
    schedules,
    table1,
    table2,
    table3,
    table4,
    table5,
    tables,
    text_scale,
    utilization,
)
from gpipe.results.claims import Claim, claims_table
from gpipe.results.curve import read_curve, read_training
from gpipe.results.deviations import deviations_table
from gpipe.results.jobs import Job
from gpipe.results.records import (
    RECORD_FILE,
    Record,
    append_record,
    make_record,
    read_records,
    same_settings,
    without_places,
    write_records,
)
from gpipe.results.tables import TableFunction

RUNS_FILE = "runs.jsonl"
PAPER_FILE = "paper.csv"
METRICS_FILE = "metrics.jsonl"
INDEX = Path("reproductions") / "README.md"
CLAIMS: dict[str, tuple[Any, ...]] = {
    "bubble": (bubble,),
    "table1_model_size": (table1,),
    "table2_throughput": (table2,),
    "table3_slow_links": (table3,),
    "table4_imagenet_and_transfer": (table4,),
    "figure3_multilingual": (figure3, depth),
    "table5_batch_size": (table5,),
}
"""The page of each claim, and the modules that make its rows of the table of claims."""
_TABLES_BESIDE_PAPER = (table1, table2, table3, table4, table5, figure3)
BESIDE_PAPER = {name: table for part in _TABLES_BESIDE_PAPER for name, table in part.BESIDE_PAPER.items()}
_PARTS = (
    tables,
    faults,
    schedules,
    planned_memory,
    peers,
    depth,
    utilization,
    checkpoint_cost,
    text_scale,
    *_TABLES_BESIDE_PAPER,
)
EVERY_TABLE = {name: table for part in _PARTS for name, table in part.TABLES.items()}
_BLOCK = re.compile(r"(<!-- table: (?P<name>[a-z0-9_]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(
    readme: Path,
    records: list[Record],
    tables: Mapping[str, TableFunction] = EVERY_TABLE,
    own: Mapping[str, str] | None = None,
) -> str:
    """Return a README with each of its tables made from records, and from the paper's numbers in paper.csv beside it.

    A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`; `tables` says how to make each of them,
    and `own` has those that are not made from this page's records alone. Raises ValueError where the README asks for a
    table that nobody can make, or for none.
    """

    def fill(block: re.Match[str]) -> str:
        name = block["name"]
        if own is not None and name in own:
            return f"{block[1]}{own[name]}{block[3]}"
        if name in BESIDE_PAPER:
            return f"{block[1]}{BESIDE_PAPER[name](records, read_paper(readme.parent))}{block[3]}"
        if name not in tables:
            known = ", ".join((*tables, *BESIDE_PAPER, *(own or ())))
            raise ValueError(f"{readme} asks for the table {name!r}; there are {known}.")
        return f"{block[1]}{tables[name](records)}{block[3]}"

    text, count = _BLOCK.subn(fill, readme.read_text(encoding="utf-8"))
    if count == 0:
        raise ValueError(f"{readme} has no table; write <!-- table: NAME --> and <!-- end --> into it.")
    return text


def read_paper(folder: Path) -> list[dict[str, str]]:
    """Read the paper's numbers that a reproduction stands beside: the rows of its paper.csv."""
    with (folder / PAPER_FILE).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _read_paper_if_there(root: Path, page: str) -> list[dict[str, str]]:
    folder = root / "reproductions" / page
    return read_paper(folder) if (folder / PAPER_FILE).exists() else []


def read_run(folder: Path) -> Record:
    """Read a run's record, with the curves of its log among the results, and without this machine's folders."""
    record = without_places(read_records(folder / RECORD_FILE)[0])
    return replace(record, results={**record.results, **_curves(folder)})


def _curves(folder: Path) -> dict[str, Any]:
    """Return what a run's log says of its course: evaluation by evaluation, and over the steps of training."""
    metrics = folder / METRICS_FILE
    return {"curve": read_curve(metrics), "training": read_training(metrics)} if metrics.exists() else {}


def readmes(root: Path) -> dict[Path, list[Record]]:
    """Return each README below the repository's root that shows results, with the records that it shows.

    That of a reproduction shows its own; the one at the root and the index of the reproductions may show all.
    """
    folders = sorted(path.parent for path in (root / "reproductions").glob(f"*/{RUNS_FILE}"))
    found = {folder / "README.md": read_records(folder / RUNS_FILE) for folder in folders}
    every = [record for records in found.values() for record in records]
    if (of_tests := root / "tests" / "reliability" / RUNS_FILE).exists():  # of no claim of the paper
        every += read_records(of_tests)
    return {**found, **{path: every for path in (root / "README.md", root / INDEX) if path.exists()}}


def pages(root: Path) -> dict[Path, str]:
    """Return the text that each README below the repository's root should have, with its tables made anew."""
    found = readmes(root)
    claimed = claims_by_page(root, found.get(root / "README.md", []))
    own: dict[Path, dict[str, str]] = {}
    for readme in found:
        page = readme.parent.name
        own[readme] = {
            "claims": claims_table([(page, claimed.get(page, []))]),
            "deviations": deviations_table(root, page),
        }
    own[root / "README.md"] = {"claims": claims_table(claimed.items(), links="reproductions/")}
    own[root / INDEX] = {"claims": claims_table(claimed.items(), links=""), "deviations": deviations_table(root, None)}
    return {readme: rendered(readme, records, own=own[readme]) for readme, records in found.items()}


def claims_by_page(root: Path, records: Sequence[Record]) -> dict[str, list[Claim]]:
    """Return the claims of each page that is there, by its folder's name, from the records of all pages."""
    return {
        page: [claim for part in parts for claim in part.claims(records, _read_paper_if_there(root, page))]
        for page, parts in CLAIMS.items()
        if (root / "reproductions" / page).is_dir()
    }


def render(root: Path) -> None:
    """Rewrite the tables of every README from the records."""
    for readme, text in pages(root).items():
        readme.write_text(text, encoding="utf-8")


def add_record(root: Path, name: str, record: Record) -> None:
    """Add a record to a reproduction, without this machine's folders, and render every README."""
    append_record(root / "reproductions" / name / RUNS_FILE, without_places(record))
    render(root)


def add_jobs(root: Path, name: str, experiment: str, command: str, jobs: Sequence[Job]) -> None:
    """Add what a sweep came to to the records of a reproduction, and render every README.

    experiment, command: the sweep's. A record takes the place of an earlier one of the same settings; of a data set
    that is not on this machine the reason is recorded, once, and so is that of each job which lacks devices. A training
    that diverged is a result too: its record has the error as "failure", and its curves until then. Raises
    FileNotFoundError without such a reproduction.
    """
    path = root / "reproductions" / name / RUNS_FILE
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: start the sweep in the repository, or set reproduction=null.")
    new = [read_run(job.folder) for job in jobs if job.record is not None]
    new += [_diverged(job, command, experiment) for job in jobs if job.outcome.is_diverged]
    unmade = [job.outcome for job in jobs if job.outcome.status == "not run"]
    without_data = {outcome.data: outcome for outcome in unmade if outcome.config is None}
    for outcome in (*without_data.values(), *(outcome for outcome in unmade if outcome.config is not None)):
        settings, results = outcome.config or {"data": {"name": outcome.data}}, {"reason": outcome.reason}
        seed = settings.get("seed", 0)
        made = make_record(
            kind="not run", command=command, experiment=experiment, config=settings, seed=seed, results=results
        )
        new.append(without_places(made))
    old = [record for record in read_records(path) if not any(_replaces(other, record) for other in new)]
    write_records(path, [*old, *new])
    render(root)


def _diverged(job: Job, command: str, experiment: str) -> Record:
    """Return the record of a training whose loss or gradient was not finite."""
    settings, results = job.outcome.config or {}, {"failure": job.outcome.reason, **_curves(job.folder)}
    seed = settings.get("seed", 0)
    made = make_record(
        kind="measured", command=command, experiment=experiment, config=settings, seed=seed, results=results
    )
    return without_places(made)


def _replaces(new: Record, old: Record) -> bool:
    """Say whether a record says anew what an old one says; where speed is all that came out, on the same machine."""
    if (new.kind, new.experiment) != (old.kind, old.experiment) or not same_settings(new.config, old.config):
        return False
    is_speed = new.kind == "measured" and new.results.get("top1") is None and "failure" not in new.results
    return not is_speed or (new.hardware, new.config.get("launch")) == (old.hardware, old.config.get("launch"))


def main(arguments: list[str]) -> None:
    """Add the record of a run where that is asked for, then render."""
    match arguments:
        case []:
            pass
        case ["add", run, folder]:
            append_record(Path(folder) / RUNS_FILE, read_run(Path(run)))
        case _:
            raise SystemExit(__doc__)
    render(Path.cwd())


if __name__ == "__main__":
    main(sys.argv[1:])
