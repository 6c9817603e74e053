"""What saving a checkpoint costs the training, on the memory of hosts and of GPUs."""

from collections.abc import Sequence

from gpipe.records import Record
from reproductions.table import markdown, newest, not_run, provenance

CHECKPOINT_COST = "checkpoint_cost"
OURS, DCP_SYNCHRONOUS, DCP_ASYNCHRONOUS = "ours", "torch.distributed.checkpoint, save", "the same, async_save"
_CHECKPOINT_PROGRAM = f"python -m experiments.{CHECKPOINT_COST}"
_CHECKPOINT_ON_GPUS = f"{_CHECKPOINT_PROGRAM} --device cuda"
_MOST_STILL = 0.1  # of the time of the synchronous save


def checkpoint_cost(records: Sequence[Record]) -> str:
    """Return one row per way to save: how long training stood still, and when the files were on the disk."""
    return _checkpoint_cost(_newest_save(records, on_gpus=False), _CHECKPOINT_PROGRAM)


def checkpoint_cost_on_gpus(records: Sequence[Record]) -> str:
    """Return the same where the tensors are on GPUs."""
    return _checkpoint_cost(_newest_save(records, on_gpus=True), _CHECKPOINT_ON_GPUS)


def _newest_save(records: Sequence[Record], *, on_gpus: bool) -> Record | None:
    """Return the newest record of saves from the memory of GPUs, or from the hosts'."""
    return newest([record for record in records if bool(record.hardware["gpus"]) == on_gpus], CHECKPOINT_COST)


def _checkpoint_cost(record: Record | None, program: str) -> str:
    if record is None:
        return not_run(program)
    found = {row["saver"]: row for row in record.results["rows"]}
    synchronous = found[DCP_SYNCHRONOUS]["still_seconds"]
    rows = []
    for name, row in found.items():
        share = row["still_seconds"] / synchronous
        rows.append(
            [
                name,
                f"{1000 * row['still_seconds']:.0f}",
                f"{share:.1%}",
                f"{row['total_seconds']:.2f}",
                f"{row['bytes_per_second'] / 1e6:.0f}",
                ("reached" if share <= _MOST_STILL else "not reached") if name == OURS else "",
            ]
        )
    config = record.config
    count = config["num_processes"]
    title = f"{config['num_bytes'] / 1e6:.0f} MB, {count} {'process' if count == 1 else 'processes'}"
    header = [title, "training paused, ms", "relative to the synchronous save", "until on disk, s", "MB/s"]
    return markdown([*header, f"goal: at most {_MOST_STILL:.0%}"], rows)


def checkpoint_cost_run(records: Sequence[Record]) -> str:
    """Return the provenance of the measured cost."""
    return provenance(_newest_save(records, on_gpus=False), _CHECKPOINT_PROGRAM)


def checkpoint_cost_on_gpus_run(records: Sequence[Record]) -> str:
    """Return the provenance of the cost on GPUs."""
    return provenance(_newest_save(records, on_gpus=True), _CHECKPOINT_ON_GPUS)
