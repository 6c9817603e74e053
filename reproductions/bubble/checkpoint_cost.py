"""The table of what a checkpoint costs a training, from experiments/checkpoint_cost.py."""

from gpipe.results.records import Record
from gpipe.results.tables import markdown, named, newest, not_run, provenance

EXPERIMENT = "checkpoint_cost"
OURS, DCP_SYNCHRONOUS, DCP_ASYNCHRONOUS = "ours", "torch.distributed.checkpoint, save", "the same, async_save"
_PROGRAM = f"python experiments/{EXPERIMENT}.py"
_MOST = 0.1  # of the time of the synchronous save


def checkpoint_cost(records: list[Record]) -> str:
    """Return a row a way to save: how long training stood still, and when the files were on the disk."""
    record = newest(records, EXPERIMENT)
    if record is None:
        return not_run(_PROGRAM)
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
                ("reached" if share <= _MOST else "not reached") if name == OURS else "",
            ]
        )
    config = record.config
    title = f"{config['num_bytes'] / 1e6:.0f} MB, {config['num_processes']} processes"
    header = [title, "training stands still, ms", "of the synchronous save", "until on the disk, s", "MB/s"]
    return markdown([*header, f"at most {_MOST:.0%}"], rows)


def checkpoint_cost_run(records: list[Record]) -> str:
    """Return where the cost was measured."""
    return provenance(newest(records, EXPERIMENT), _PROGRAM)


TABLES = named(checkpoint_cost, checkpoint_cost_run)
