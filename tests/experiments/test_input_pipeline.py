"""The measurement of the input pipeline, on a handful of images."""

from pathlib import Path

from gpipe.records import read_records
from reproductions.table4_imagenet_and_transfer.tables import input_pipeline
from tests.support.program_server import run_program

TINY = ("--num-images", "6", "--batch-size", "4", "--image-sizes", "32", "48", "--rounds", "1")


def test_both_loaders_are_measured_and_shown(tmp_path: Path) -> None:
    done = run_program("experiments.input_pipeline", *TINY, "--record", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (record,) = read_records(tmp_path / "runs.jsonl")
    assert record.experiment == "input_pipeline" and record.kind == "measured"
    assert record.config["num_images"] == 6 and record.config["batch_size"] == 4
    assert 90_000 < record.results["mean_file_bytes"] < 140_000
    grid = record.results["grid"]
    assert [(row["image_size"], row["num_workers"]) for row in grid] == [(32, 0), (32, 2), (48, 0), (48, 2)]
    assert all(row[f"{loader}_images_per_second"] > 0 for row in grid for loader in ("ours", "torchvision"))
    assert all(row["ratio"] > 0 for row in grid)
    assert done.stdout.startswith(input_pipeline([record]) + "\n")
    lines = input_pipeline([record]).splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [["| 32", "0"], ["| 32", "2"], ["| 48", "0"], ["| 48", "2"]]


def test_without_a_record_the_table_says_so() -> None:
    assert input_pipeline([]) == "Not run: python -m experiments.input_pipeline.\n"
