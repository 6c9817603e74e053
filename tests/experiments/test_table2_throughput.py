"""The grid of Tables 2 and 3, on tiny models."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments.table2_throughput.study import TableModel
from gpipe.models import transformer_lm
from gpipe.planning.accelerator import Accelerator, LayerSeconds
from gpipe.planning.step import Setting
from gpipe.planning.timing import LayerTiming
from gpipe.records import Record, read_records
from reproductions.pages import TABLES, read_paper
from reproductions.table import make_table
from reproductions.table2_throughput.tables import table2
from reproductions.table3_slow_links.tables import table3
from tests.support.program_server import run_program

ROOT = Path(__file__).parents[2]
NUM_LAYERS = 6  # with embedding and softmax layer 8


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    folder = tmp_path_factory.mktemp("records")
    done = run_program("experiments.table2_throughput", "--small", "--rounds", "1", "--record", str(folder))
    assert done.returncode == 0, done.stderr
    return read_records(folder / "runs.jsonl")


def test_every_cell_is_planned_and_simulated_and_its_shares_add_up_to_one(records: list[Record]) -> None:
    kinds = [(record.experiment, record.kind) for record in records]
    assert kinds == [
        (f"{name}_grid", kind)
        for name in ("table2_throughput", "table3_slow_links")
        for kind in ("planned", "simulated")
    ]
    for record in records:
        models = record.results["models"]
        assert len(models) == 2
        for model in models:
            assert len(model["cells"]) == 4 * (9 if record.experiment == "table2_throughput_grid" else 3)
            assert all(sum(cell["shares"].values()) == pytest.approx(1.0) for cell in model["cells"])
            assert bool(model["layer_seconds"]) == (record.kind == "simulated")


def test_the_tables_show_what_was_recorded(records: list[Record]) -> None:
    for name, (folder, table) in TABLES.items():
        if name.startswith(("table2", "table3")) and "laptop" not in name:
            assert "Not run" not in make_table(table, records, read_paper(ROOT / "reproductions" / folder)), name
    for table, folder in ((table2, "table2_throughput"), (table3, "table3_slow_links")):
        paper = read_paper(ROOT / "reproductions" / folder)
        titles = {"amoebanet": "AmoebaNet-D (3,16)", "transformer_lm": "Transformer-8"}
        small = [row | {"title": titles[row["model"]]} for row in paper]
        lines = table(records, small).splitlines()[2:]
        assert len(lines) == len(paper)
        assert [cell.strip() for cell in lines[0].split("|")][5:12:2] == ["1.00", "1.00", "1.00", "1.00"]


def tokens(num_examples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    inputs, targets = (torch.ones(num_examples, 8, dtype=torch.int64, device=device) for _ in range(2))
    return inputs, targets


def timed(forward: float, update: float = 0.0) -> list[LayerTiming]:
    """Return timings of equal layers: recomputation takes as long as a forward, a backward twice; the loss nothing."""
    layer = LayerTiming(LayerSeconds(forward, forward, 2 * forward), update)
    return [layer] * (NUM_LAYERS + 2) + [LayerTiming(LayerSeconds(0.0, 0.0, 0.0))]


@pytest.fixture(scope="module")
def study() -> TableModel:
    """Return a Transformer whose layers take 1.5 times as long for two examples as for one, linked without delay."""
    with torch.device("meta"):
        layers = transformer_lm(NUM_LAYERS, vocabulary_size=16, model_size=8, feedforward_size=16, num_heads=2)
    device = Accelerator("d", 10**9, 1e9, 1e9, 1e9, 1e9, 1e30, 0.0, starts_ahead=False)
    return TableModel("T", layers, tokens, device, 8, (1, 2), fixed_size=2, timings={1: timed(1.0), 2: timed(1.5)})


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 1), (4, 1), (4, 4), (8, 32)])
def test_equal_layers_take_what_the_formula_says(study: TableModel, num_stages: int, num_microbatches: int) -> None:
    k, m = num_stages, num_microbatches
    cell = replace(study, timings={2: timed(1.5, update=5.0)}).cell(k, m, "simulated", "fixed", "seconds")
    assert cell["partitions"] == [8 // k] * k and cell["imbalance"] == pytest.approx(0)
    forwards = 4 * m + 3 * k - 3  # all forwards, the last stage's recomputations and backwards, the last one's way back
    expected = 1.5 * 8 / k * forwards + 5.0 * 8 / k
    assert cell["step_seconds"] == pytest.approx(expected)
    assert cell["examples_per_second"] == pytest.approx(2 * m / expected)


def test_a_size_that_was_not_timed_takes_as_long_an_example_as_the_nearest_smaller(study: TableModel) -> None:
    assert study.seconds(8, "simulated")[0] == LayerSeconds(6.0, 6.0, 12.0)


def test_a_transfer_keeps_its_ratio_to_computing(study: TableModel) -> None:
    found = replace(study, device=replace(study.device, link_bandwidth=100.0))
    times_slower = found.flops_per_second("planned") / found.flops_per_second("simulated")
    assert found.speed("simulated").link_bytes_per_second == pytest.approx(100.0 / times_slower)
    assert found.speed("planned").link_bytes_per_second == 100.0


def test_the_largest_power_of_two_that_fits_is_chosen(study: TableModel) -> None:
    setting = Setting(2, 4)
    needs = {size: study.peak_bytes(size, setting, "simulated", "seconds") for size in (1, 2, 4, 8)}
    for room, size in ((needs[8], 8), (needs[8] - 1, 4), (needs[2], 2), (needs[1] - 1, 1)):
        found = replace(study, device=replace(study.device, memory_bytes=room))
        assert found.find_fitting_size(setting, "simulated", "seconds") == size


def test_equal_mini_batches_are_shared_out_over_the_micro_batches(study: TableModel) -> None:
    sizes = [study.cell(2, m, "simulated", "equal", "seconds")["microbatch_size"] for m in (1, 4, 8)]
    assert sizes == [8, 2, 1]


def test_a_cut_by_flops_does_not_look_at_seconds(study: TableModel) -> None:
    seconds = [100.0] + [1.0] * 8
    uneven = replace(study, timings={1: [LayerTiming(LayerSeconds(forward, 0, 0)) for forward in seconds]})
    assert uneven.cut(1, 2, "simulated", "seconds") == [1, 7]
    assert uneven.cut(1, 2, "simulated", "flops") != [1, 7]
