"""The tables of the paper's Table 4: our accuracies beside the paper's, a small transfer, and the cost of all runs."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from statistics import fmean, stdev
from typing import Any

from gpipe.records import Record
from reproductions import paper_scale
from reproductions.claims import NOT_RUN, Claim, format_verdicts
from reproductions.commands import Cell, commands_table
from reproductions.design import Arm, count_images, design_table
from reproductions.study import Study
from reproductions.table import Paper, format_value, markdown, newest, not_run, provenance, write_table
from reproductions.table4_imagenet_and_transfer.model_size import (
    TRAINED,
    model_size,
    size_arms,
    size_cells,
    size_claims,
)
from reproductions.table4_imagenet_and_transfer.transfers import (
    transfer_arms,
    transfer_cells,
    transfer_checkpoints,
    transfer_claims,
    transfer_steps,
    transfers,
)
from reproductions.verdict import Interval, over_runs_and_images

PRE_TRAINING = "amoebanet_imagenet"
TRANSFERS = ("transfer", "transfer_table", "transfer_kornblith")
PAPER_SCALE = (PRE_TRAINING, *TRANSFERS)
SHORT_RUNS = "short_runs_laptop"
EVALUATED = {"averages": "top1", "weights themselves": "raw_top1"}
MARGIN = 0.005  # of the accuracy: what ours may lack and still be the paper's, which prints no deviation
INPUT_PIPELINE, IMAGE_THROUGHPUT, COST = Study("input_pipeline"), Study("image_throughput"), Study("table4_cost")


def table4(records: Sequence[Record], paper: Paper) -> str:
    """Return the paper's accuracies beside the mean and deviation of ours, one row per figure of a data set."""
    rows = []
    for row in paper:
        runs = paper_scale_runs(records, row["data"])
        sizes = [f"{int(row[key]):,}" for key in ("train", "test", "classes")]
        for figure in (figure for figure in ("top1", "top5") if row[figure]):
            ours = [run.results[figure] for run in runs]
            interval = _above_paper(ours, row, figure)
            reason = reason_not_run(records, row["data"])
            not_there = NOT_RUN if reason is None else f"{NOT_RUN}: {reason}"
            verdict = not_there if interval is None else interval.describe(".2%")
            title = row["title"] if figure == "top1" else f"{row['title']}, top-5"
            rows.append([title, *sizes, f"{float(row[figure]):.1f}%", *_spread(ours), verdict])
    header = ["data set", "train", "test", "classes", "paper", "ours", "deviation", "runs", "verdict"]
    return markdown(header, rows)


def table4_other_settings(records: Sequence[Record]) -> str:
    """Return the runs with a paper-scale name but other settings."""
    return paper_scale.other_settings(records, PAPER_SCALE, _differences)


def claims(records: Sequence[Record], paper: Paper) -> list[Claim]:
    """Return the paper's accuracies beside ours, and whether pre-training helps a small model."""
    imagenet = next(row for row in paper if row["data"] == "imagenet")
    rows = []
    for figure, name in (("top1", "top-1"), ("top5", "top-5")):
        ours = [run.results[figure] for run in paper_scale_runs(records, "imagenet")]
        verdict = format_verdicts([("", _above_paper(ours, imagenet, figure))], ".2%")
        measured = " ± ".join(filter(None, _spread(ours)[:2])) or NOT_RUN
        rows.append(Claim(f"ImageNet {name} (Table 4)", f"{imagenet[figure]}%", measured, verdict=verdict))
    transfers = [row for row in paper if row["data"] != "imagenet"]
    tried = [(row, [run.results["top1"] for run in paper_scale_runs(records, row["data"])]) for row in transfers]
    verdicts = [interval.verdict for row, ours in tried if (interval := _above_paper(ours, row, "top1"))]
    of_all = f"of {len(transfers)} data sets"
    numbers = [float(row["top1"]) for row in transfers]
    rows.append(
        Claim(
            f"{len(transfers)} transfers, top-1 (Table 4)",
            f"{min(numbers)}% to {max(numbers)}%",
            f"{len(verdicts)} {of_all}" if verdicts else NOT_RUN,
            verdict=f"{verdicts.count('reproduced')} {of_all} reproduced" if verdicts else NOT_RUN,
        )
    )
    return rows + transfer_claims(records) + size_claims(records)


def short_runs(records: Sequence[Record]) -> str:
    """Return the accuracy of short trainings by either kind of batch-norm statistics, with and without averaging."""
    found: dict[tuple[int, int | None], list[Record]] = {}
    for run in _short_runs(records):
        trainer = run.config["trainer"]
        found.setdefault((trainer["max_steps"], trainer["evaluation"]["statistics_batches"]), []).append(run)
    if not found:
        return not_run(f"train.py -m +experiment={SHORT_RUNS}")
    rows = []
    for (steps, num_batches), runs in sorted(found.items(), key=lambda item: (item[0][0], item[0][1] or 0)):
        statistics = "moving averages" if num_batches is None else f"of {num_batches} mini-batches"
        top1 = [_spread(run.results["evaluation"]["test"][name] for run in runs) for name in EVALUATED.values()]
        rows.append([steps, statistics, *top1[0][:2], *top1[1]])
    columns = [column for evaluated in EVALUATED for column in (f"top-1 of the {evaluated}", "deviation")]
    return markdown(["steps", "batch-norm statistics", *columns, "runs"], rows)


def transfer_laptop_run(records: Sequence[Record]) -> str:
    """Return the provenance of the newest transfer at laptop scale."""
    return provenance(newest(transfers(records)), "transfers at laptop scale")


@COST.table
def table4_cost(record: Record) -> str:
    """Return what each run of Table 4 would compute, and for how long: planned, not measured."""
    columns = {
        "data set": lambda row: row["data"],
        "images": lambda row: f"{row['train_images']:,}",
        "batch": lambda row: row["batch_size"],
        "steps": lambda row: f"{row['steps']:,}",
        "TFLOPs per image, forward": lambda row: f"{row['forward_flops'] / 1e12:.2f}",
        "total FLOPs": lambda row: f"{row['total_flops']:.1e}",
        "accelerator-days": lambda row: f"{row['accelerator_days']:,.1f}",
        "stages x GiB of state, largest": lambda row: f"{row['num_stages']} x {row['state_bytes'] / 2**30:.1f}",
    }
    return write_table(record.results["rows"], columns)


def table4_design(records: Sequence[Record], paper: Paper) -> str:
    """Return the question, budget, tuning and test items of each study of the page."""
    arms = []
    for question, experiment, names in (
        ("how accurate is the paper's model?", PRE_TRAINING, ["imagenet"]),
        ("how accurate is it on other data?", "transfer", [row["data"] for row in paper if row["data"] != "imagenet"]),
    ):
        runs = [run for name in names for run in paper_scale_runs(records, name)]
        arms.append(Arm(question, "AmoebaNet-B (18,512)", experiment, runs, test_items=_count_paper(paper, runs)))
    arms += transfer_arms(records)
    alone: dict[str, list[Record]] = {}
    for run in _image_runs(records):
        if run.experiment not in PAPER_SCALE:
            alone.setdefault(run.experiment, []).append(run)
    arms += [
        Arm(question, _name_model(runs[0].config["model"]), experiment, runs, test_items=_count_tested(runs))
        for question, experiment, runs in (
            ("what is a short training worth?", SHORT_RUNS, _short_runs(records)),
            *(("how accurate is a small model?", experiment, runs) for experiment, runs in alone.items()),
        )
        if runs
    ]
    return design_table([*arms, *size_arms(records)])


def table4_commands(records: Sequence[Record]) -> str:
    """Return the command of every training at laptop scale on the page."""
    cells = [
        *(Cell(run.experiment, run, {}) for run in _image_runs(records)),
        *transfer_cells(records),
        *(Cell(SHORT_RUNS, run, {}) for run in _short_runs(records)),
        *size_cells(records),
    ]
    return commands_table(cells) if cells else not_run("train.py -m +experiment=transfer_table_laptop")


def _short_runs(records: Sequence[Record]) -> list[Record]:
    return [run for run in records if run.experiment == SHORT_RUNS and run.results.get("top1") is not None]


def _count_tested(runs: Sequence[Record]) -> str:
    return f"{count_images(runs):,} images of {', '.join(sorted({data_of(run) for run in runs}))}"


def _count_paper(paper: Paper, runs: Sequence[Record]) -> str:
    """Say how many test images the sets of runs have, by the paper."""
    counts = [int(row["test"]) for row in paper if row["data"] in {data_of(run) for run in runs}]
    return f"{sum(counts):,} images of {len(counts)} data sets" if counts else ""


def data_of(record: Record) -> str:
    """Return the name of a record's data set; empty if it has none."""
    return str(record.config.get("data", {}).get("name", ""))


def is_tuned(run: Record) -> bool:
    """Return whether a training began with the weights of another one."""
    return run.config.get("init_from") is not None


def paper_scale_runs(records: Sequence[Record], data: str) -> list[Record]:
    """Return the runs on a data set that count beside the paper's."""
    return [run for run in paper_scale.paper_scale(records, PAPER_SCALE, _differences) if data_of(run) == data]


def _differences(run: Record) -> list[str]:
    """Return the settings in which a run departs from the paper-scale run on ImageNet, or transfer to its data set."""
    if run.experiment == PRE_TRAINING:
        found = paper_scale.differences(run, [f"+experiment={PRE_TRAINING}"])
        return found if data_of(run) == "imagenet" else [f"data.name: {data_of(run)} (paper scale: imagenet)", *found]
    experiment = run.experiment if run.experiment == "transfer_table" else "transfer"
    found = paper_scale.differences(run, [f"+experiment={experiment}", *paper_scale.data_set(run)])
    return found if is_tuned(run) else ["init_from: null (paper scale: a pre-trained run)", *found]


def reason_not_run(records: Sequence[Record], data: str) -> str | None:
    """Return the newest recorded reason why a data set was not run, or None."""
    found = newest(record for record in records if record.kind == "not run" and data_of(record) == data)
    return None if found is None else str(found.results["reason"])


def _above_paper(ours: Sequence[float], row: Mapping[str, str], figure: str) -> Interval | None:
    """Return the interval of how far our accuracies are above the paper's less the margin; None without runs."""
    return over_runs_and_images(ours, int(row["test"]), float(row[figure]) / 100 - MARGIN)


def _spread(values: Iterable[float]) -> list[str]:
    """Return mean, sample deviation and number."""
    found = list(values)
    if not found:
        return ["", "", "0"]
    return [f"{fmean(found):.2%}", f"{stdev(found):.2%}" if len(found) > 1 else "", str(len(found))]


def image_runs(records: Sequence[Record]) -> str:
    """Return the trainings on images from scratch: model, data, accuracy and speed."""
    columns = {
        "model": lambda run: _name_model(run.config["model"]),
        "images": lambda run: f"{run.config['data']['name']}, {run.config['data']['image_size']} px",
        "K": lambda run: run.config["pipeline"]["num_stages"],
        "M": lambda run: run.config["pipeline"]["num_microbatches"],
        "seed": lambda run: run.seed,
        "top-1": lambda run: f"{run.results['top1']:.1%}",
        "minutes": lambda run: f"{run.results['seconds'] / 60:.1f}",
        "images/s": lambda run: f"{run.examples_per_second:.0f}",
        "bubble": lambda run: format_value(run.results.get("bubble"), ".1%"),
        "MiB per process, peak": lambda run: format_value(run.results.get("peak_memory_bytes"), ".0f", 2**-20),
    }
    return write_table(sorted(_image_runs(records), key=lambda run: run.date), columns)


def image_runs_from(records: Sequence[Record]) -> str:
    """Return the command, date and hardware of the newest run on images."""
    return provenance(newest(_image_runs(records)), "train.py")


@INPUT_PIPELINE.table
def input_pipeline(record: Record) -> str:
    """Return how many images per second are decoded and augmented, by our loader and by torchvision's."""
    columns = {
        "px": lambda row: row["image_size"],
        "worker processes": lambda row: row["num_workers"],
        "ours, images/s": lambda row: f"{row['ours_images_per_second']:.0f}",
        "torchvision, images/s": lambda row: f"{row['torchvision_images_per_second']:.0f}",
        "ours / torchvision, median of pairs": lambda row: f"{row['ratio']:.2f}",
    }
    return write_table(record.results["grid"], columns)


@IMAGE_THROUGHPUT.table
def image_throughput(record: Record) -> str:
    """Return how many images per second one GPU trains on, beside torchgpipe's model at the same batch size."""
    grid = record.results["grid"]
    setting = itemgetter("variant", "image_size", "rematerialize", "batch_size")
    theirs = {setting(row): row.get("images_per_second") for row in grid if row["code"] == "torchgpipe"}

    def compare(row: Mapping[str, Any]) -> str:
        speed, peer = row.get("images_per_second"), theirs.get(setting(row))
        return f"{speed / peer:.2f}" if speed and peer else ""

    columns = {
        "model": lambda row: f"{_name_model(row)}, {row['image_size']} px",
        "recomputation": lambda row: row["rematerialize"],
        "code": lambda row: (
            row["code"] + (", compiled" if row["compiled"] else ", CUDA graphs" if row.get("cuda_graphs") else "")
        ),
        "batch": lambda row: row["batch_size"],
        "images/s": lambda row: format_value(row.get("images_per_second"), ".1f") or row["outcome"],
        "GiB, peak": lambda row: format_value(row.get("peak_memory_bytes"), ".1f", 2**-30),
        "relative to torchgpipe": compare,
    }
    return write_table(_with_graphs(grid), columns)


_SETTING = "variant", "num_layers", "num_filters", "image_size", "rematerialize", "batch_size"


def _with_graphs(grid: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of models and modes and, behind those without CUDA graphs, one for these that says so."""
    for _, group in itertools.groupby(grid, lambda row: (row["variant"], row["rematerialize"])):
        rows = list(group)
        yield from rows
        if not any(row.get("cuda_graphs") for row in rows):
            fixed = {name: rows[-1][name] for name in _SETTING}
            yield fixed | {"code": "ours", "compiled": False, "cuda_graphs": True, "outcome": NOT_RUN}


def _image_runs(records: Sequence[Record]) -> list[Record]:
    """Return the trainings on images, without those that have tables of their own."""
    runs = [run for run in records if run.results.get("top1") is not None and "image_size" in run.config["data"]]
    return [run for run in runs if not run.experiment.startswith(("transfer", SHORT_RUNS, *TRAINED.values()))]


def _name_model(model: Mapping[str, Any]) -> str:
    return f"AmoebaNet-{model['variant'].upper()} ({model['num_layers']},{model['num_filters']})"


TABLES = (
    table4_design,
    table4,
    table4_other_settings,
    transfer_steps,
    transfer_checkpoints,
    transfer_laptop_run,
    table4_commands,
    short_runs,
    model_size,
    *COST.tables,
    image_runs,
    image_runs_from,
    *INPUT_PIPELINE.tables,
    *IMAGE_THROUGHPUT.tables,
)
