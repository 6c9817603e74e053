"""The curves of a run are read from its log."""

import json
from pathlib import Path

from reproductions.curve import read_curve, read_training


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


def write(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_figures_of_a_part_of_an_evaluation_set_are_left_out(tmp_path: Path) -> None:
    lines = [{"step": 1, "epoch": 0, "valid/loss": 2.0, "valid/sw/loss": 3.0}]
    assert read_curve(write(tmp_path / "metrics.jsonl", lines)) == [{"step": 1, "epoch": 0, "valid/loss": 2.0}]


def test_a_training_has_rows_of_so_many_steps_with_means_and_the_largest_norm(tmp_path: Path) -> None:
    lines = [
        {"step": step, "learning_rate": 0.1, "loss": float(step), "nll": 2.0, "clipped": None, "gradient_norm": -step}
        for step in range(1, 8)
    ]
    path = write(tmp_path / "metrics.jsonl", [{"step": 0, "plan": []}, *lines, {"step": 7, "valid/loss": 1.0}])
    assert read_training(path, num_rows=2, num_steps=3) == [
        {"step": 4, "loss": 2.5, "nll": 2.0, "gradient_norm": -1},
        {"step": 7, "loss": 6.0, "nll": 2.0, "gradient_norm": -5},
    ]
    assert [row["step"] for row in read_training(path, num_rows=30, num_steps=3)] == [3, 6, 7]


def test_a_run_that_failed_and_began_anew_is_read_from_its_last_start(tmp_path: Path) -> None:
    lines = [{"step": step, "learning_rate": 0.1, "loss": loss} for step, loss in ((1, 9.0), (2, 9.0), (1, 1.0))]
    assert read_training(write(tmp_path / "metrics.jsonl", lines)) == [{"step": 1, "loss": 1.0}]
