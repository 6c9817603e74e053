"""What saving a checkpoint costs the training, on the memory of hosts and of GPUs."""

from collections.abc import Sequence

from gpipe.records import Record
from reproductions.study import Study
from reproductions.table import Table, markdown, name_table

OURS, DCP_SYNCHRONOUS, DCP_ASYNCHRONOUS = "ours", "torch.distributed.checkpoint, save", "the same, async_save"
CHECKPOINT_COST = Study("checkpoint_cost")
_ON_GPUS = Study(CHECKPOINT_COST.experiment, f"python -m experiments.{CHECKPOINT_COST.experiment} --device cuda")
_MOST_STILL = 0.1  # of the time of the synchronous save


def _make_table(record: Record) -> str:
    """Return one row per way to save: how long training stood still, and when the files were on the disk."""
    found = {row["saver"]: row for row in record.results["rows"]}
    synchronous = found[DCP_SYNCHRONOUS]["still_seconds"]
    rows = []
    for name, row in found.items():
        share = row["still_seconds"] / synchronous
        still, rate = f"{1000 * row['still_seconds']:.0f}", f"{row['bytes_per_second'] / 1e6:.0f}"
        verdict = ("reached" if share <= _MOST_STILL else "not reached") if name == OURS else ""
        rows.append([name, still, f"{share:.1%}", f"{row['total_seconds']:.2f}", rate, verdict])
    count = record.config["num_processes"]
    title = f"{record.config['num_bytes'] / 1e6:.0f} MB, {count} {'process' if count == 1 else 'processes'}"
    header = [title, "training paused, ms", "relative to the synchronous save", "until on disk, s", "MB/s"]
    return markdown([*header, f"goal: at most {_MOST_STILL:.0%}"], rows)


def _select(name: str, table: Table, *, on_gpus: bool) -> Table:
    """Return a table of the records of saves from the memory of GPUs, or from the hosts'."""

    def of_records(records: Sequence[Record]) -> str:
        return table([record for record in records if bool(record.hardware["gpus"]) == on_gpus])

    return name_table(name, of_records)


checkpoint_cost = _select("checkpoint_cost", CHECKPOINT_COST.table(_make_table), on_gpus=False)
checkpoint_cost_run = _select("checkpoint_cost_run", CHECKPOINT_COST.run, on_gpus=False)
checkpoint_cost_on_gpus = _select("checkpoint_cost_on_gpus", _ON_GPUS.table(_make_table), on_gpus=True)
checkpoint_cost_on_gpus_run = _select("checkpoint_cost_on_gpus_run", _ON_GPUS.run, on_gpus=True)

TABLES = (checkpoint_cost, checkpoint_cost_run, checkpoint_cost_on_gpus, checkpoint_cost_on_gpus_run)
