"""The tables that READMEs show, each made from records alone."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpipe.results.records import Record


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def engine_overhead(records: list[Record]) -> str:
    """Return the share of the bubble formula's throughput that each engine reached with layers that sleep."""
    record = _newest(records, "engine_overhead")
    rows = [
        [
            f"{row['engine']}, {row['rematerialize']}",
            str(row["num_stages"]),
            str(row["num_microbatches"]),
            f"{row['step_seconds'] * 1e3:.1f}",
            f"{row['formula_seconds'] * 1e3:.1f}",
            f"{row['formula_seconds'] / row['step_seconds']:.3f}",
        ]
        for row in record.results["grid"]
    ]
    return markdown(["engine, recomputation", "K", "M", "ms a step", "formula, ms", "formula / step"], rows)


def one_stage_overhead(records: list[Record]) -> str:
    """Return the time of a one-stage pipeline beside a hand-written loop."""
    seconds = _newest(records, "engine_overhead").results["one_stage"]
    loop = seconds["hand-written loop"]
    rows = [[name, f"{value * 1e3:.1f}", f"{value / loop:.3f}"] for name, value in seconds.items()]
    return markdown(["K = 1, M = 4, AmoebaNet-D (6,32), 32 images of 64 px", "ms a step", "of the loop"], rows)


def engine_overhead_run(records: list[Record]) -> str:
    """Return the command, date and hardware of the newest run."""
    return _provenance(_newest(records, "engine_overhead"))


def image_runs(records: list[Record]) -> str:
    """Return the runs that trained on images: what was trained on what, how far, and how fast."""
    runs = [record for record in records if "top1" in record.results]
    rows = [
        [
            _model(run),
            f"{_of(run, 'data', 'name')}, {_of(run, 'data', 'image_size')} px",
            str(_of(run, "pipeline", "num_stages")),
            str(_of(run, "pipeline", "num_microbatches")),
            str(run.seed),
            f"{run.results['top1']:.1%}",
            f"{run.results['seconds'] / 60:.1f}",
            f"{run.results['images_per_second']:.0f}",
            f"{run.results['bubble']:.1%}" if run.results.get("bubble") is not None else "",
            f"{run.results['peak_memory_bytes'] / 2**20:.0f}" if run.results.get("peak_memory_bytes") else "",
        ]
        for run in sorted(runs, key=lambda run: run.date)
    ]
    header = ["model", "images", "K", "M", "seed", "top-1", "minutes", "images/s", "bubble", "MiB a process, peak"]
    return markdown(header, rows)


def image_runs_from(records: list[Record]) -> str:
    """Return the command, date and hardware of the newest run on images."""
    return _provenance(max((record for record in records if "top1" in record.results), key=lambda run: run.date))


TABLES: dict[str, Callable[[list[Record]], str]] = {
    "engine_overhead": engine_overhead,
    "one_stage_overhead": one_stage_overhead,
    "engine_overhead_run": engine_overhead_run,
    "image_runs": image_runs,
    "image_runs_from": image_runs_from,
}


def _provenance(record: Record) -> str:
    hardware = ", ".join(f"{name} {value}" for name, value in record.hardware.items() if value)
    packages = ", ".join(f"{name} {version}" for name, version in record.packages.items())
    commit = (record.commit or "outside git")[:12] + (" with uncommitted changes" if record.dirty else "")
    rows = [
        ["command", f"`{record.command}`"],
        ["numbers", record.kind],
        ["date, commit", f"{record.date[:10]}, {commit}"],
        ["hardware", hardware],
        ["packages", packages],
    ]
    return markdown(["", ""], rows)


def _model(run: Record) -> str:
    model = run.config["model"]
    return f"AmoebaNet-{model['variant'].upper()} ({model['num_layers']},{model['num_filters']})"


def _of(run: Record, section: str, key: str) -> Any:
    return run.config[section][key]


def _newest(records: list[Record], experiment: str) -> Record:
    found = [record for record in records if record.experiment == experiment]
    if not found:
        raise ValueError(f"there is no record of {experiment}; run experiments/{experiment}.py")
    return max(found, key=lambda record: record.date)
