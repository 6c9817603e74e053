"""The tables that READMEs show, each made from records alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpipe.results.records import Record

TableFunction = Callable[..., str]
"""(records) -> Markdown; or, of those in BESIDE_PAPER, (records, the paper's numbers)."""
Paper = Sequence[Mapping[str, str]]
"""The rows of a paper.csv."""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def engine_overhead(records: list[Record]) -> str:
    """Return the share of the bubble formula's throughput that each engine reached with layers that sleep."""
    record = newest(records, "engine_overhead")
    if record is None:
        return not_run("engine_overhead")
    rows = [
        [
            f"{row['engine']}, {row['rematerialize']}",
            str(row["num_stages"]),
            str(row["num_microbatches"]),
            f"{row['forward_seconds'] * 1e3:.2f} + {row['backward_seconds'] * 1e3:.2f}",
            f"{row['step_seconds'] * 1e3:.1f}",
            f"{row['formula_seconds'] * 1e3:.1f}",
            f"{row['formula_seconds'] / row['step_seconds']:.3f}",
        ]
        for row in record.results["grid"]
    ]
    header = ["engine, recomputation", "K", "M", "F + B as slept, ms", "ms a step", "formula, ms", "formula / step"]
    return markdown(header, rows)


def one_stage_overhead(records: list[Record]) -> str:
    """Return the time of a one-stage pipeline beside a hand-written loop."""
    record = newest(records, "one_stage_overhead")
    if record is None:
        return not_run("one_stage_overhead")
    results, config = record.results, record.config
    model = f"AmoebaNet-D ({config['num_layers']},{config['num_filters']})"
    setting = f"{model}, {config['batch_size']} images of {config['image_size']} px, M = {config['num_microbatches']}"
    rows = [
        ["hand-written loop", f"{results['hand_written_seconds'] * 1e3:.1f}", ""],
        ["ours, K = 1", f"{results['ours_seconds'] * 1e3:.1f}", f"{results['ratio']:.3f}"],
    ]
    return markdown([setting, "ms a step", "of the loop, median of pairs"], rows)


def engine_overhead_run(records: list[Record]) -> str:
    """Return the command, date and hardware of the newest run."""
    return provenance(newest(records, "engine_overhead"), "engine_overhead")


def image_runs(records: list[Record]) -> str:
    """Return the runs that trained on images from scratch: what was trained on what, how far, and how fast."""
    runs = _image_runs(records)
    rows = [
        [
            _model(run),
            f"{_of(run, 'data', 'name')}, {_of(run, 'data', 'image_size')} px",
            str(_of(run, "pipeline", "num_stages")),
            str(_of(run, "pipeline", "num_microbatches")),
            str(run.seed),
            f"{run.results['top1']:.1%}",
            f"{run.results['seconds'] / 60:.1f}",
            f"{run.examples_per_second:.0f}",
            f"{run.results['bubble']:.1%}" if run.results.get("bubble") is not None else "",
            f"{run.results['peak_memory_bytes'] / 2**20:.0f}" if run.results.get("peak_memory_bytes") else "",
        ]
        for run in sorted(runs, key=lambda run: run.date)
    ]
    header = ["model", "images", "K", "M", "seed", "top-1", "minutes", "images/s", "bubble", "MiB a process, peak"]
    return markdown(header, rows)


def image_runs_from(records: list[Record]) -> str:
    """Return the command, date and hardware of the newest run on images."""
    runs = _image_runs(records)
    return provenance(max(runs, key=lambda run: run.date, default=None), "train.py")


def input_pipeline(records: list[Record]) -> str:
    """Return how many images a second are decoded and augmented, by our loader and by torchvision's."""
    record = newest(records, "input_pipeline")
    if record is None:
        return not_run("input_pipeline")
    rows = [
        [
            str(row["image_size"]),
            str(row["num_workers"]),
            f"{row['ours_images_per_second']:.0f}",
            f"{row['torchvision_images_per_second']:.0f}",
            f"{row['ratio']:.2f}",
        ]
        for row in record.results["grid"]
    ]
    header = [
        "px",
        "worker processes",
        "ours, images/s",
        "torchvision, images/s",
        "ours / torchvision, median of pairs",
    ]
    return markdown(header, rows)


def image_throughput(records: list[Record]) -> str:
    """Return how many images a second one GPU trains on, beside torchgpipe's model at the same batch size."""
    record = newest(records, "image_throughput")
    if record is None:
        return not_run("image_throughput")
    grid = record.results["grid"]
    setting = ("variant", "image_size", "rematerialize", "batch_size")
    theirs = {
        tuple(row[name] for name in setting): row.get("images_per_second")
        for row in grid
        if row["code"] == "torchgpipe"
    }
    rows = []
    for row in grid:
        speed, peer = row.get("images_per_second"), theirs.get(tuple(row[name] for name in setting))
        model = f"AmoebaNet-{row['variant'].upper()} ({row['num_layers']},{row['num_filters']})"
        rows.append(
            [
                f"{model}, {row['image_size']} px",
                row["rematerialize"],
                row["code"] + (", compiled" if row["compiled"] else ""),
                str(row["batch_size"]),
                f"{speed:.1f}" if speed else row["outcome"],
                f"{row['peak_memory_bytes'] / 2**30:.1f}" if row.get("peak_memory_bytes") else "",
                f"{speed / peer:.2f}" if speed and peer else "",
            ]
        )
    return markdown(["model", "recomputation", "code", "batch", "images/s", "GiB, peak", "of torchgpipe's"], rows)


def provenance(record: Record | None, program: str) -> str:
    """Return where a record comes from: command, kind of its numbers, date, commit, hardware and packages."""
    if record is None:
        return not_run(program)
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


def _image_runs(records: list[Record]) -> list[Record]:
    """Return the trainings on images but the transfers, which have tables of their own."""
    runs = [run for run in records if run.results.get("top1") is not None and "image_size" in run.config["data"]]
    return [run for run in runs if not run.experiment.startswith("transfer")]


def _model(run: Record) -> str:
    model = run.config["model"]
    return f"AmoebaNet-{model['variant'].upper()} ({model['num_layers']},{model['num_filters']})"


def _of(run: Record, section: str, key: str) -> Any:
    return run.config[section][key]


def newest(records: list[Record], experiment: str) -> Record | None:
    """Return the newest record of an experiment, None where there is none."""
    found = [record for record in records if record.experiment == experiment]
    return max(found, key=lambda record: record.date, default=None)


def not_run(program: str) -> str:
    """Return what stands in the place of a table that has no record."""
    return f"Not run: {program}.\n"


def named(*tables: TableFunction) -> dict[str, TableFunction]:
    """Return tables under the names by which READMEs ask for them: those of their functions."""
    return {table.__name__: table for table in tables}


TABLES = named(
    engine_overhead,
    one_stage_overhead,
    engine_overhead_run,
    image_runs,
    image_runs_from,
    input_pipeline,
    image_throughput,
)
