"""The tables of the paper's Table 1: its models' parameters and memory, planned and measured, and the largest that fit.

Our memory and torchgpipe's is in GiB; the paper's is as printed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from gpipe.records import Record
from reproductions.claims import COUNTED, NOT_RUN, Claim
from reproductions.table import Paper, as_number, as_printed, markdown, newest, not_run, provenance
from reproductions.table1_model_size.planned_memory import PLANNED_MEMORY

EXPERIMENT = "table1_capacity"
PROGRAM = "python -m experiments.table1_capacity"
ON_GPU = f"{PROGRAM} on a machine with a GPU"
CUTS = {"variance of FLOPs": "the paper's cut", "memory": "cut by memory"}
MEASURED_CUT = "memory"
_GIB = 2**30


def table1_parameters(records: Sequence[Record], paper: Paper) -> str:
    """Return each model's number of parameters, beside the paper's and torchgpipe's."""
    columns = _columns(records, "planned")
    if not columns:
        return not_run(PROGRAM)
    rows = [
        [
            name_column(row),
            row["parameters"],
            row["torchgpipe_parameters"],
            *_counts(column, row["parameters"]),
        ]
        for row, column in _beside(paper, columns)
    ]
    header = ["model", "paper", "torchgpipe", "ours", "printed", "ours with auxiliary head", "printed"]
    return markdown([*header, "agrees with the paper"], rows)


def table1_memory(records: Sequence[Record], paper: Paper) -> str:
    """Return the memory of all devices together, in GiB: parameters, and the sum of the peaks of activations."""
    columns = _columns(records, "planned")
    if not columns:
        return not_run(PROGRAM)
    rows = []
    for row, column in _beside(paper, columns):
        cuts = column["cuts"]
        parameters = _total(cuts[MEASURED_CUT], "parameter_bytes")
        activations = [_total(cuts[cut], "activation_bytes") for cut in CUTS]
        known = [row["parameter_gb"], row["torchgpipe_parameter_gib"], parameters]
        rows.append([name_column(row), *known, row["activation_gb"], row["torchgpipe_activation_gib"], *activations])
    header = ["model", "parameters: paper", "torchgpipe", "planned", "activations: paper", "torchgpipe"]
    return markdown([*header, *(f"planned, {name}" for name in CUTS.values())], rows)


def table1_variants(records: Sequence[Record], paper: Paper) -> str:
    """Return the activations of all devices together, and the fullest device, in GiB, with other choices."""
    found = _newest(records, "planned", "variants")
    if found is None:
        return not_run(PROGRAM)
    rows = []
    for row in paper:
        for entry in (entry for entry in found.results["variants"] if _key(entry) == _key(row)):
            choices = [entry["num_microbatches"], entry["attention"] or ""]
            known = [row["activation_gb"], row["torchgpipe_activation_gib"]]
            planned = [_gibibytes(entry[name][cut]) for name in ("activation_bytes", "peak_bytes") for cut in CUTS]
            rows.append([name_column(row), *choices, *known, *planned])
    header = ["model", "M", "attention", "activations: paper", "torchgpipe, M = 128"]
    header += [f"{figure}, {name}" for figure in ("planned", "fullest device") for name in CUTS.values()]
    return markdown(header, rows)


def table1_devices(records: Sequence[Record], paper: Paper) -> str:
    """Return the peak of the fullest device in GiB, planned and measured, and whether it fits."""
    columns, measured = _columns(records, "planned"), _columns(records, "measured")
    if not columns:
        return not_run(PROGRAM)
    rows = []
    for row, column in _beside(paper, columns):
        room = column["memory_bytes"]
        peaks = [_plan_peak(column, cut) for cut in CUTS]
        planned = [cell for peak in peaks for cell in (_gibibytes(peak), fit(peak, room))]
        rows.append([name_column(row), f"{room / _GIB:g}", *planned, *_measured_peak(measured.get(_key(row)))])
    header = [cell for name in CUTS.values() for cell in (f"planned, {name}", "")]
    return markdown(["model", "device memory, GiB", *header, f"measured, {CUTS[MEASURED_CUT]}", ""], rows)


def table1_search(records: Sequence[Record], paper: Paper) -> str:
    """Return the largest model that fits each K, as planned, beside the paper's."""
    found = _newest(records, "planned", "search")
    if found is None:
        return not_run(PROGRAM)
    searched = {_key(row): row for row in found.results["search"]}
    rows = []
    for row in paper:
        if _key(row) in searched:
            entry, at_least = searched[_key(row)], int(row["num_filters"] or row["num_layers"])
            cells = [cell for cut in CUTS for cell in _searched(entry, cut, at_least)]
            family = f"AmoebaNet-D ({row['num_layers']},D)" if row["num_filters"] else "Transformer of L layers"
            rows.append([family, row["num_stages"], at_least, row["parameters"], *cells])
    cuts = [cell for name in CUTS.values() for cell in (f"planned, {name}", "parameters", "at least the paper's")]
    return markdown(["largest D or L", "K", "paper", "parameters", *cuts], rows)


def table1_measured(records: Sequence[Record], paper: Paper) -> str:
    """Return the peak of each measured stage in GiB beside its plan."""
    columns = _columns(records, "measured")
    if not columns:
        return not_run(ON_GPU)
    rows = []
    for row, column in _beside(paper, columns):
        outcome = [column["out_of_memory"]] * len(column["stages"]) if "out_of_memory" in column else None
        peaks = outcome or [_gibibytes(peak) for peak in column["peak_bytes"]]
        for stage, planned, peak in zip(column["stages"], column["planned_bytes"], peaks, strict=True):
            rows.append([name_column(row), stage, column["partitions"][stage], _gibibytes(planned), peak])
    return markdown(["model", "stage", "layers", "planned", "measured"], rows)


def table1_run(records: Sequence[Record]) -> str:
    """Return the provenance of the plans."""
    return provenance(_newest(records, "planned", "columns"), PROGRAM)


def table1_measured_run(records: Sequence[Record]) -> str:
    """Return the provenance of the measurements."""
    return provenance(_newest(records, "measured", "columns"), ON_GPU)


def claims(records: Sequence[Record], paper: Paper) -> list[Claim]:
    """Return how much larger a model pipelines hold, and how many of the paper's ten models fit."""
    columns, measured = _columns(records, "planned"), _columns(records, "measured")
    pair = [("amoebanet", "Pipeline-8"), ("amoebanet", "Naive-1")]
    larger, smaller = (as_number(row["parameters"]) for key in pair for row in paper if _key(row) == key)
    rows = [
        Claim(
            "25 times larger on 8 accelerators: AmoebaNet-D (abstract of the paper's first version)",
            f"25; Table 1's own numbers give {larger / smaller:.0f}",
            _larger(columns, measured, _find_peak, pair),
            planned=_larger(columns, columns, _plan_peak, pair) if columns else "",
            verdict=COUNTED if measured.keys() >= {*pair} else NOT_RUN,
        )
    ]
    fitting = [cut for cut in CUTS for column in columns.values() if _plan_peak(column, cut) <= column["memory_bytes"]]
    planned = "; ".join(f"{name}: {fitting.count(cut)}" for cut, name in CUTS.items()) if columns else ""
    fits = sum(_find_peak(column) <= column["memory_bytes"] for column in measured.values())
    in_part = sum(len(column["stages"]) < len(column["partitions"]) for column in measured.values())
    parts = f"; for {in_part} of them only the first, the middle and the last stage" if in_part else ""
    tried, verdict = (f"{fits} of {len(measured)} tried{parts}", COUNTED) if measured else (NOT_RUN, NOT_RUN)
    text = "models that fit their accelerators (Table 1)"
    return [*rows, Claim(text, f"{len(paper)}", tried, planned=planned, verdict=verdict)]


def _larger(
    planned: Mapping[tuple[str, str], Mapping[str, Any]],
    found: Mapping[tuple[str, str], Mapping[str, Any]],
    peak: Callable[[Mapping[str, Any]], float],
    pair: Sequence[tuple[str, str]],
) -> str:
    """Write by how much the larger of two models exceeds the smaller, and whether the peaks that were found fit."""
    if not (planned and found.keys() >= {*pair}):
        return NOT_RUN
    fits = [fit(peak(found[key]), found[key]["memory_bytes"]) for key in pair]
    larger, smaller = (planned[key]["parameters"] for key in pair)
    return f"{larger / smaller:.1f}; the larger {fits[0]}, the smaller {fits[1]}"


def _plan_peak(column: Mapping[str, Any], cut: str = MEASURED_CUT) -> int:
    """Return the planned peak of a column's fullest device."""
    return int(max(device["peak_bytes"] for device in column["cuts"][cut]["devices"]))


def _find_peak(column: Mapping[str, Any]) -> float:
    """Return the peak of a column's fullest measured stage, infinite if one ran out of memory."""
    return float(inf if "out_of_memory" in column else max(column["peak_bytes"]))


def fit(peak_bytes: float, memory_bytes: int) -> str:
    """Write whether a peak fits."""
    return "fits" if peak_bytes <= memory_bytes else "does not fit"


def _newest(records: Sequence[Record], kind: str, part: str) -> Record | None:
    return newest((record for record in records if record.kind == kind and part in record.results), EXPERIMENT)


def _columns(records: Sequence[Record], kind: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the columns of the newest record, by family and name; empty without one."""
    record = _newest(records, kind, "columns")
    return {} if record is None else {_key(column): column for column in record.results["columns"]}


def _beside(
    paper: Paper, columns: Mapping[tuple[str, str], dict[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
    """Yield the paper's columns that were tried, each with ours: small models stand in for two."""
    for row in paper:
        if (column := columns.get(_key(row))) is not None:
            yield row, column


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["family"], row["name"]


def name_column(row: Mapping[str, Any]) -> str:
    """Name a column of the paper's table."""
    layers, filters = row["num_layers"], row["num_filters"]
    return f"{row['name']}: {f'AmoebaNet-D ({layers},{filters})' if filters else f'Transformer-{layers}'}"


def _counts(column: Mapping[str, Any], printed: str) -> list[str]:
    """Return a model's exact and rounded counts, and which of them the paper prints."""
    counts = {"the model": column["parameters"], "with head": column.get("parameters_with_auxiliary_head")}
    texts = {name: "" if count is None else as_printed(count, printed) for name, count in counts.items()}
    cells = [cell for name, count in counts.items() for cell in ("" if count is None else f"{count:,}", texts[name])]
    return [*cells, " and ".join(name for name, text in texts.items() if text == printed) or "neither"]


def _gibibytes(size: float) -> str:
    return f"{size / _GIB:.2f}"


def _total(cut: Mapping[str, Any], name: str) -> str:
    return _gibibytes(sum(device[name] for device in cut["devices"]))


def _searched(entry: Mapping[str, Any], cut: str, at_least: int) -> list[str]:
    """Return the largest size, its parameters, and whether it is at least another one."""
    size, parameters = entry["largest"][cut], entry["parameters"][cut]
    if size is None:
        return ["none", "", "no"]
    return [str(size), as_printed(parameters, "1.00B"), "yes" if size >= at_least else "no"]


def _measured_peak(column: Mapping[str, Any] | None) -> list[str]:
    """Write the peak of a column's fullest measured stage, and whether it fits."""
    if column is None:
        return ["not run", ""]
    peak = _find_peak(column)
    return ["out of memory" if peak == inf else _gibibytes(peak), fit(peak, column["memory_bytes"])]


TABLES = (
    table1_parameters,
    table1_memory,
    table1_devices,
    table1_search,
    table1_measured,
    table1_variants,
    table1_run,
    table1_measured_run,
    *PLANNED_MEMORY.tables,
)
