"""The measurement of the training's throughput, on tiny models."""

from argparse import Namespace
from collections.abc import Callable

import pytest
import torch
from torch import nn

from experiments.image_throughput import measurements
from gpipe.records import Record, read_records
from reproductions.table4_imagenet_and_transfer.tables import IMAGE_THROUGHPUT, image_throughput
from tests.support.program_server import run_program

TINY = ("--small", "--rounds", "1", "--warm-up", "0", "--backend", "eager")
STAND_IN = """
from torch import nn
def amoebanetd(num_classes, num_layers, num_filters):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes))
"""


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Return the record of a run beside another model in the place of torchgpipe's."""
    models = tmp_path_factory.mktemp("torchgpipe") / "benchmarks" / "models"
    models.mkdir(parents=True)
    (models / "amoebanet.py").write_text(STAND_IN)
    options = "--torchgpipe", str(models.parents[1]), "--record", str(models)
    done = run_program("experiments.image_throughput", *TINY, *options)
    assert done.returncode == 0, done.stderr
    (found,) = read_records(models / "runs.jsonl")
    return found


@pytest.mark.slow
@pytest.mark.xdist_group("image throughput")  # of one record
def test_each_mode_and_code_is_measured(record: Record) -> None:
    grid = record.results["grid"]
    found = [(row["variant"], row["rematerialize"], row["code"], row["compiled"]) for row in grid]
    ours, theirs = [("ours", False), ("ours", True)], [("torchgpipe", False)]
    expected = [("b", "always", *code) for code in ours] + [("d", "never", *code) for code in theirs + ours]
    assert found == expected
    assert all(row["outcome"] == "measured" and row["images_per_second"] > 0 for row in grid)
    assert record.experiment == "image_throughput" and record.config["num_microbatches"] == 4


@pytest.mark.slow
@pytest.mark.xdist_group("image throughput")  # of one record
def test_ours_is_shown_beside_torchgpipes_at_the_same_batch(record: Record) -> None:
    lines = image_throughput([record]).splitlines()[2:]
    ratios = [line.split(" | ")[-1].removesuffix(" |").strip() for line in lines]
    speeds = [row["images_per_second"] for row in record.results["grid"]]
    assert ratios == ["", "", "", "1.00", f"{speeds[3] / speeds[2]:.2f}", f"{speeds[4] / speeds[2]:.2f}", ""]
    graphs = [line for line in image_throughput([record]).splitlines() if ", CUDA graphs | 4 | not run |" in line]
    assert len(graphs) == 2  # they need a GPU


def test_the_table_says_what_did_not_fit_or_was_not_run() -> None:
    fixed = {"variant": "d", "num_layers": 18, "num_filters": 256, "image_size": 224, "rematerialize": "never"}
    fixed |= {"compiled": False, "batch_size": 512}
    grid = [
        fixed | {"code": code, "cuda_graphs": graphs, "outcome": outcome}
        for code, graphs, outcome in (
            ("torchgpipe", False, "not run"),
            ("ours", False, "out of memory"),
            ("ours", True, "out of memory"),
        )
    ]
    record = IMAGE_THROUGHPUT.make_record({}, {"grid": grid})
    lines = image_throughput([record]).splitlines()[2:]
    assert lines[0] == "| AmoebaNet-D (18,256), 224 px | never | torchgpipe | 512 | not run |  |  |"
    assert lines[1] == "| AmoebaNet-D (18,256), 224 px | never | ours | 512 | out of memory |  |  |"
    assert lines[2] == "| AmoebaNet-D (18,256), 224 px | never | ours, CUDA graphs | 512 | out of memory |  |  |"
    assert image_throughput([]) == "Not run: python -m experiments.image_throughput.\n"


def test_a_peer_that_is_not_there_has_a_row_all_the_same() -> None:
    options = Namespace(torchgpipe=None, backend="eager", cuda_graphs=False)
    row = next(measurements.measure_rows(measurements.SMALL[1], "never", options, torch.device("cpu")))
    assert row["code"] == "torchgpipe" and row["outcome"] == "not run"


def test_the_batch_is_halved_until_everything_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_our_step(*arguments: object) -> tuple[Callable[..., None], nn.Module]:
        compiled = arguments[-1] is not None

        def step(images: torch.Tensor, labels: torch.Tensor) -> None:
            if len(images) > (8 if compiled else 16):
                raise RuntimeError("a layer failed") from torch.OutOfMemoryError("too much")

        return step, nn.Linear(1, 1)

    monkeypatch.setattr(measurements, "make_our_step", make_our_step)
    options = Namespace(torchgpipe=None, backend="eager", cuda_graphs=False, rounds=1, warm_up=0)
    setting = measurements.Setting("b", 3, 8, 4, 32)
    rows = list(measurements.measure_rows(setting, "always", options, torch.device("cpu")))
    found = [(row["batch_size"], row["compiled"], row["outcome"]) for row in rows]
    out, fits = "out of memory", "measured"
    assert found == [(32, False, out), (16, False, fits), (16, True, out), (8, False, fits), (8, True, fits)]


def test_cuda_graphs_that_do_not_fit_halve_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_our_step(*arguments: object, cuda_graphs: bool = False) -> tuple[Callable[..., None], nn.Module]:
        def step(images: torch.Tensor, labels: torch.Tensor) -> None:
            if cuda_graphs:
                raise torch.OutOfMemoryError("too much")

        return step, nn.Linear(1, 1)

    monkeypatch.setattr(measurements, "make_our_step", make_our_step)
    options = Namespace(torchgpipe=None, backend=None, cuda_graphs=True, rounds=1, warm_up=0)
    setting = measurements.Setting("b", 3, 8, 4, 32)
    rows = list(measurements.measure_rows(setting, "always", options, torch.device("cpu")))
    found = [(row["batch_size"], row["cuda_graphs"], row["outcome"]) for row in rows]
    assert found == [(32, False, "measured"), (32, True, "out of memory")]


def test_without_a_gpu_only_the_small_run_starts() -> None:
    done = run_program("experiments.image_throughput", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and done.stderr == "not run: no GPU; --small tries the script on the CPU\n"
