"""The tables of the paper's Table 4: our accuracies beside the paper's, a small transfer, and what all would cost."""

from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

from gpipe.results.records import Record
from gpipe.results.tables import Paper, markdown, named, not_run, provenance

# The same settings as the paper's, not a smaller model.
PAPER_SCALE = ("amoebanet_imagenet", "transfer", "transfer_table")
LAPTOP_TRANSFERS = ("transfer_laptop", "transfer_table_laptop")
_TOLERANCE = 0.005  # of the accuracy, as a fraction; the paper does not give a deviation


def table4(records: Sequence[Record], paper: Paper) -> str:
    """Return the paper's accuracies beside the mean and deviation of ours, a row a data set."""
    rows = []
    for row in paper:
        top1 = [run.results["top1"] for run in paper_scale_runs(records, row["data"])]
        expected = float(row["top1"]) / 100
        sizes = [f"{int(row[key]):,}" for key in ("train", "test", "classes")]
        verdict = _verdict(top1, expected, reason_not_run(records, row["data"]))
        rows.append([row["title"], *sizes, f"{expected:.1%}", *_spread(top1), verdict])
    header = ["data set", "train", "test", "classes", "paper", "ours", "deviation", "runs", "verdict"]
    return markdown(header, rows)


def transfer_laptop(records: Sequence[Record]) -> str:
    """Return the accuracy of a small model, fine-tuned and from scratch at the same budget.

    A row a data set and learning rate; gains are between runs of the same seed.
    """
    rows = []
    for (data, rate), (scratch, tuned) in small_transfers(records).items():
        top1 = [{seed: run.results["top1"] for seed, run in runs.items()} for runs in (scratch, tuned)]
        gains = [top1[1][seed] - top1[0][seed] for seed in sorted(scratch.keys() & tuned.keys())]
        rows.append([data, f"{rate:g}", *_spread(top1[0].values()), *_spread(top1[1].values()), *_gain(gains)])
    if not rows:
        return not_run("train.py -m +experiment=transfer_table scale=laptop")
    spread = ["deviation", "runs"]
    header = ["data set", "learning rate", "from scratch", *spread, "fine-tuned", *spread, "gain, mean (smallest)"]
    return markdown([*header, "pre-training"], rows)


def small_transfers(
    records: Sequence[Record],
) -> dict[tuple[str, float], tuple[dict[int, Record], dict[int, Record]]]:
    """Return the runs from scratch and those fine-tuned, by seed, for each data set and learning rate.

    Of two runs with the same seed the later record counts.
    """
    found: dict[tuple[str, float], tuple[dict[int, Record], dict[int, Record]]] = {}
    for run in records:
        if run.experiment in LAPTOP_TRANSFERS and "top1" in run.results:
            rate = run.config["optimizer"]["learning_rate"]
            found.setdefault((data_of(run), rate), ({}, {}))[is_tuned(run)][run.seed] = run
    return dict(sorted(found.items()))


def transfer_laptop_run(records: Sequence[Record]) -> str:
    """Return where the newest of the small transfers ran, and on what."""
    runs = [record for record in records if record.experiment in LAPTOP_TRANSFERS and "top1" in record.results]
    return provenance(max(runs, key=lambda run: run.date, default=None), "transfers at laptop scale")


def table4_cost(records: Sequence[Record]) -> str:
    """Return what each run of Table 4 would compute, and for how long: planned, not measured."""
    planned = [record for record in records if record.experiment == "table4_cost"]
    if not planned:
        return not_run("experiments/table4_cost.py")
    newest = max(planned, key=lambda record: record.date)
    rows = [
        [
            row["data"],
            f"{row['train_images']:,}",
            f"{row['batch_size']}",
            f"{row['steps']:,}",
            f"{row['forward_flops'] / 1e12:.2f}",
            f"{row['total_flops']:.1e}",
            f"{row['accelerator_days']:,.1f}",
            f"{row['num_stages']} x {row['state_bytes'] / 2**30:.1f}",
        ]
        for row in newest.results["rows"]
    ]
    header = ["data set", "images", "batch", "steps", "TFLOPs an image, forward", "FLOPs in all", "accelerator-days"]
    header.append("stages x GiB of state, largest")
    return markdown(header, rows)


def data_of(record: Record) -> str:
    """Return the name of a record's data set, empty where it is not of one."""
    name: str = record.config.get("data", {}).get("name", "")
    return name


def is_tuned(run: Record) -> bool:
    """Say whether a training began with another one's weights."""
    return run.config.get("init_from") is not None


def paper_scale_runs(records: Sequence[Record], data: str) -> list[Record]:
    """Return the runs on a data set that count beside the paper's: with its model, and transfers only if fine-tuned."""
    runs = [run for run in records if run.kind == "measured" and run.experiment in PAPER_SCALE and data_of(run) == data]
    return [run for run in runs if is_tuned(run) or run.experiment == "amoebanet_imagenet"]


def reason_not_run(records: Sequence[Record], data: str) -> str | None:
    """Return the newest reason on record why a data set was not run, None where there is none."""
    reasons = [record for record in records if record.kind == "not run" and data_of(record) == data]
    newest = max(reasons, key=lambda record: record.date, default=None)
    return None if newest is None else str(newest.results["reason"])


def _verdict(top1: Sequence[float], expected: float, reason: str | None) -> str:
    if not top1:
        return "not run" if reason is None else f"not run: {reason}"
    return "reproduced" if fmean(top1) >= expected - _TOLERANCE else "not reproduced"


def _spread(values: Iterable[float]) -> list[str]:
    """Return mean, sample deviation and number."""
    found = list(values)
    if not found:
        return ["", "", "0"]
    return [f"{fmean(found):.2%}", f"{stdev(found):.2%}" if len(found) > 1 else "", str(len(found))]


def _gain(gains: Sequence[float]) -> list[str]:
    """Return the mean and smallest gain of fine-tuning over the seeds, in points, and what it says."""
    if not gains:
        return ["", "not run: one of the two is missing"]
    points = f"{100 * fmean(gains):+.2f} ({100 * min(gains):+.2f})"
    return [points, "it helps" if fmean(gains) > 0 else "it does not help"]


BESIDE_PAPER = named(table4)
TABLES = named(transfer_laptop, transfer_laptop_run, table4_cost)
