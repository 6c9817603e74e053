"""The table of what a checkpoint costs."""

from gpipe.records import Record
from reproductions.bubble.saves import (
    CHECKPOINT_COST,
    DCP_SYNCHRONOUS,
    OURS,
    checkpoint_cost,
    checkpoint_cost_on_gpus,
    checkpoint_cost_run,
)


def measured(still_seconds: float, *, gpus: tuple[str, ...] = ()) -> Record:
    rows = [
        {"saver": name, "still_seconds": still, "total_seconds": 2.0, "bytes_per_second": 4e8}
        for name, still in ((OURS, still_seconds), (DCP_SYNCHRONOUS, 2.0))
    ]
    return CHECKPOINT_COST.make_record({"num_bytes": 800_000_000, "num_processes": 2}, {"rows": rows}, gpus=gpus)


def test_what_was_not_measured_is_not_claimed() -> None:
    assert checkpoint_cost([]) == checkpoint_cost_run([]) == "Not run: python -m experiments.checkpoint_cost.\n"


def test_ours_alone_is_judged_by_its_share_of_the_synchronous_save() -> None:
    lines = checkpoint_cost([measured(0.2)]).splitlines()
    assert lines[0].startswith("| 800 MB, 2 processes | training paused, ms |")
    assert lines[2:] == [
        "| ours | 200 | 10.0% | 2.00 | 400 | reached |",
        "| torch.distributed.checkpoint, save | 2000 | 100.0% | 2.00 | 400 |  |",
    ]
    assert "| not reached |" in checkpoint_cost([measured(0.25)])


def test_saves_from_gpus_have_a_table_of_their_own() -> None:
    records = [measured(0.1), measured(0.2, gpus=("H100",))]
    assert "| ours | 100 |" in checkpoint_cost(records)
    assert "| ours | 200 |" in checkpoint_cost_on_gpus(records)
    assert checkpoint_cost_on_gpus(records[:1]) == "Not run: python -m experiments.checkpoint_cost --device cuda.\n"
