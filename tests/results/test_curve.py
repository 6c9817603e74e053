"""The curve of a run is read from its log."""

import json
from pathlib import Path

from gpipe.results.curve import read_curve


def test_a_row_has_an_evaluation_and_the_means_of_the_steps_before_it(tmp_path: Path) -> None:
    lines = [
        {"step": 0, "plan": [{"stage": 0}]},
        {"step": 1, "epoch": 0, "loss": 3.0, "top1": 0.25, "learning_rate": 0.1},
        {"step": 2, "epoch": 0, "loss": 1.0, "top1": 0.75},
        {"step": 2, "epoch": 1, "test/loss": 1.5, "test/top1": 0.5},
        {"step": 3, "epoch": 1, "loss": None, "top1": 1.0},
        {"step": 3, "epoch": 1, "test/loss": None, "test/top1": 0.625},
        {"step": 3, "outcome": [{"figure": "top1", "value": 0.625}]},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_curve(path) == [
        {"step": 2, "epoch": 1, "loss": 2.0, "top1": 0.5, "test/loss": 1.5, "test/top1": 0.5},
        {"step": 3, "epoch": 1, "top1": 1.0, "test/top1": 0.625},
    ]
