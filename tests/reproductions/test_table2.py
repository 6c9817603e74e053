"""Table 2: speed-ups over each model's own base, of each kind in a column of its own."""

from dataclasses import replace

from gpipe.pipeline.schedule import Kind, gpipe
from gpipe.planning.simulation import simulate
from gpipe.records import Record, make_record
from reproductions.speed_ups import count_near
from reproductions.table2_throughput.tables import (
    GRID,
    LAPTOP,
    SPEED_UPS,
    STEP_TIMELINE,
    claims,
    step_timeline,
    table2,
    table2_laptop,
    table2_laptop_equal,
    table2_laptop_equal_run,
    table2_laptop_run,
    table2_law,
)
from tests.reproductions.paper_scale_records import composed
from tests.reproductions.translation_records import cells

LONG_AGO = "2020-01-01T00:00:00+00:00"
SHARES = {"computing": 0.5, "recomputation": 0.25, "bubble": 0.125, "imbalance": 0.125, "transfer": 0.0, "update": 0.0}


def row(title: str, k: int, m: int, speed_up: str, torchgpipe: str = "") -> dict[str, str]:
    family = "amoebanet" if title == "A" else "transformer_lm"
    names = {"model": family, "title": title, "num_stages": str(k), "num_microbatches": str(m)}
    return names | {"speed_up": speed_up, "torchgpipe_samples_per_second": torchgpipe}


PAPER = [row("A", 2, 1, "1", "10.0"), row("A", 8, 32, "4", "30.0"), row("T", 2, 1, "1"), row("T", 8, 32, "6.3")]


def grid(kind: str, **speeds: float) -> Record:
    """Return a grid in which K=8, M=32 is so much faster than K=2, M=1, by "<how micro-batches are chosen>_<cut>"."""
    cells = [
        {"num_stages": k, "num_microbatches": m, "batch": name.split("_")[0], "cut_by": name.split("_")[1]}
        | {"examples_per_second": 7.0 * (speed if k == 8 else 1), "microbatch_size": 16, "peak_bytes": 2**32}
        | {"partitions": [3, 1], "imbalance": 0.5, "shares": SHARES}
        for name, speed in speeds.items()
        for k, m in ((2, 1), (8, 32))
    ]
    figures = {"device": "tpu", "memory_bytes": 2**33, "flops_per_second": 5e12, "link_bytes_per_second": 6e10}
    if kind == "simulated":
        figures |= {"flops_per_second": 5e10, "link_bytes_per_second": 6e8}
    models = [{"model": "A", "cells": cells} | figures]
    return make_record(kind=kind, command="c", experiment=GRID, config={}, seed=0, results={"models": models})


def run(k: int, m: int, batch_size: int, speed: float) -> Record:
    """A run with the paper-scale settings."""
    cell = [f"pipeline.num_stages={k}", f"pipeline.num_microbatches={m}", f"trainer.batch_size={batch_size}"]
    return composed("+experiment=table2_throughput", *cell, init_from=None, examples_per_second=speed)


def small_run(k: int, m: int, batch_size: int, speed: float, seed: int = 0) -> Record:
    model = {"family": "amoebanet", "variant": "d", "num_layers": 6, "num_filters": 32}
    pipeline = {"num_stages": k, "num_microbatches": m}
    config = {"model": model, "pipeline": pipeline, "trainer": {"batch_size": batch_size}}
    results = {"examples_per_second": speed, "bubble": 0.25}
    return make_record(kind="measured", command="c", experiment=LAPTOP, config=config, seed=seed, results=results)


def test_each_kind_stands_in_its_own_column_beside_the_papers_number() -> None:
    records = [grid("planned", fits_seconds=5.0, fits_flops=3.0), grid("simulated", fits_seconds=4.4, fits_flops=2.0)]
    first, second, third, fourth = cells(table2(records, PAPER))
    assert first[:4] == ["A", "2", "1", "1"]
    assert first[4:] == ["1.00", "+0%"] * 4 + ["1.00"]
    assert second[4:] == ["5.00", "+25%", "3.00", "-25%", "4.40", "+10%", "2.00", "-50%", "3.00"]
    assert third[:3] == ["T", "2", "1"] and fourth[3:] == ["6.3"] + [""] * 9


def test_the_newest_grid_counts() -> None:
    old = replace(grid("planned", fits_seconds=5.0), date=LONG_AGO)
    assert cells(table2([grid("planned", fits_seconds=6.0), old], PAPER))[1][4] == "6.00"


def test_measured_runs_with_growing_and_with_equal_mini_batches_are_apart() -> None:
    growing, equal = [run(2, 1, 4, 10.0), run(8, 32, 128, 40.0)], [run(2, 1, 128, 16.0)]
    fixed = cells(SPEED_UPS.fixed([*growing, *equal, grid("planned", fixed_seconds=5.0)], PAPER))
    assert [line[4:] for line in fixed[:2]] == [["1.00", "", "1.00"], ["5.00", "", "4.00"]]
    same = cells(SPEED_UPS.equal([*growing, *equal, grid("simulated", equal_seconds=5.0)], PAPER))
    assert [line[4:] for line in same[:2]] == [["", "1.00", "1.00"], ["", "5.00", "2.50"]]
    assert fixed[2][-1] == fixed[3][-1] == "not run"


def test_small_models_do_not_count_as_the_papers() -> None:
    assert cells(SPEED_UPS.fixed([small_run(2, 1, 4, 10.0)], PAPER))[0][-1] == "not run"


def test_a_cell_that_the_paper_does_not_have_stands_among_other_settings() -> None:
    (row,) = cells(SPEED_UPS.other_settings([run(2, 1, 4, 10.0), run(4, 1, 4, 9.0)], PAPER))
    assert row[-1] == "pipeline.num_stages: 4 (paper scale: 2); launch.num_processes: 4 (paper scale: 2)"


def test_the_speed_of_two_replicas_or_of_one_process_stands_among_other_settings() -> None:
    cell = ["pipeline.num_stages=2", "pipeline.num_microbatches=1", "trainer.batch_size=4"]
    runs = [
        composed("+experiment=table2_throughput", *cell, launch, examples_per_second=1.0)
        for launch in ("launch.num_replicas=2", "launch.num_processes=1")
    ]
    assert cells(SPEED_UPS.fixed(runs, PAPER)) == cells(SPEED_UPS.fixed([], PAPER))
    assert [row[-1] for row in cells(SPEED_UPS.other_settings(runs, PAPER))] == [
        "launch.num_processes: 4 (paper scale: 2); launch.num_replicas: 2 (paper scale: 1)",
        "launch.num_processes: 1 (paper scale: 2)",
    ]


def test_the_claims_have_a_column_for_each_kind() -> None:
    titles = {"A": "AmoebaNet-D (18,256)", "T": "Transformer-48"}
    paper = [one | {"title": titles[one["title"]]} for one in PAPER]
    paper.append(paper[-1] | {"num_stages": "2", "speed_up": "1.8"})
    planned = grid("planned", fits_seconds=5.0, fits_flops=3.5, fixed_seconds=5.0)
    planned.results["models"][0]["model"] = titles["A"]
    headline, amoebanet, _, near = claims([planned, run(2, 1, 4, 10.0), run(8, 32, 128, 45.0)], paper)
    assert (headline.paper, headline.measured, headline.simulated, headline.planned) == ("3.5", "not run", "", "")
    both_cuts = "cut by seconds: 5.00; cut by FLOPs: 3.50"
    assert (amoebanet.paper, amoebanet.measured, amoebanet.planned) == ("4", "4.50", both_cuts)
    both_cuts = "cut by seconds: 0 of 3; cut by FLOPs: 1 of 3"
    assert (near.paper, near.measured, near.simulated, near.planned) == ("3 numbers", "1 of 3", "", both_cuts)
    assert {claim.verdict for claim in claims([planned], paper)} == {"not run"}


def test_a_claim_names_the_cut_where_there_is_only_one() -> None:
    near = SPEED_UPS.claim_cells([grid("simulated", fits_flops=4.0)], PAPER, "Table 2")
    assert (near.simulated, near.planned) == ("cut by FLOPs: 1 of 2", "")


def test_the_base_of_the_speed_ups_is_no_near_cell() -> None:
    assert count_near({("A", 2, 1): 1.0, ("A", 8, 32): 4.0}, PAPER[:2]) == "1 of 1"
    assert count_near({}, PAPER) == ""


def test_runs_of_another_machine_than_the_newest_ones_are_left_out() -> None:
    old = replace(run(2, 1, 4, 10.0), hardware={"cpu": "another", "gpus": []}, date=LONG_AGO)
    assert cells(SPEED_UPS.fixed([old, run(8, 32, 128, 40.0)], PAPER))[0][-1] == "not run"


def test_the_law_of_early_recomputation_is_what_the_simulator_finds() -> None:
    seconds = {Kind.FORWARD: 1.0, Kind.RECOMPUTE: 1.0, Kind.BACKWARD: 2.0}
    speeds = {
        (k, m): k * m / simulate(gpipe(k, m), lambda task: seconds[task.kind]).makespan_seconds
        for k, m in ((2, 1), (4, 4), (8, 32))
    }
    paper = [row("T", k, m, "2") for k, m in speeds]
    for line, speed in zip(cells(table2_law([], paper)), speeds.values(), strict=True):
        assert line[5:7] == [f"{speed / speeds[2, 1]:.2f}", f"{2 * speeds[2, 1] / speed:.2f}"]


def test_the_number_of_micro_batches_that_the_law_would_need_is_found_where_there_is_one() -> None:
    at_eight, at_four = (2 / 7, 4 * 8 / (4 * 8 + 9)), (2 / 7, 4 * 4 / (4 * 4 + 9))
    paper = [row("T", 2, 1, "1"), row("T", 4, 4, f"{at_eight[1] / at_eight[0]}")]
    paper += [row("T", 4, 32, f"{at_four[1] / at_four[0]}"), row("T", 4, 32, "3.6")]
    assert [line[7] for line in cells(table2_law([], paper))] == ["1.0", "8.0", "4.0", "none"]


def test_the_bubble_formula_stands_beside_the_paper() -> None:
    assert cells(table2_law([], PAPER))[3][:5] == ["T", "8", "32", "6.3", f"{256 / 39:.2f}"]


def test_where_the_time_goes_stands_beside_the_bubbles_formula() -> None:
    records = [grid("planned", fits_seconds=5.0), grid("simulated", fits_seconds=5.0)]
    shares = ["50.0%", "25.0%", "12.5%", "12.5%", "0.0%", "0.0%"]
    assert cells(SPEED_UPS.breakdown(records))[1] == ["A", "8", "32", "16", "4.0 of 8", *shares, f"{7 / 39:.1%}"]
    assert cells(SPEED_UPS.figures(records)) == [["A", "tpu", "5,000", "60", "50.0", "0.6", "100"]]


def test_the_cuts_of_each_kind_stand_in_columns_of_their_own() -> None:
    planned, simulated = grid("planned", fits_seconds=5.0), grid("simulated", fits_seconds=5.0, fits_flops=2.0)
    planned.results["models"][0]["cells"][1]["partitions"] = [2, 2]
    assert cells(SPEED_UPS.partitions([planned, simulated])) == [
        ["A", "8", "seconds", "2 2", "50.0%", "3 1", "50.0%"],
        ["A", "8", "flops", "", "", "3 1", "50.0%"],
    ]
    assert cells(SPEED_UPS.partitions([simulated]))[0] == ["A", "8", "seconds", "", "", "3 1", "50.0%"]


def test_planned_and_simulated_columns_name_their_own_records() -> None:
    records = [grid("planned", fits_seconds=5.0), grid("simulated", fits_seconds=5.0)]
    records = [replace(record, command=f"python {record.kind}.py") for record in records]
    assert "| command | `python simulated.py` |\n| numbers | simulated |" in SPEED_UPS.run(records)
    assert "| command | `python planned.py` |\n| numbers | planned |" in SPEED_UPS.planned_run(records)


def test_the_laptops_speeds_name_their_newest_run() -> None:
    runs = [small_run(1, 1, 4, 8.0), small_run(2, 1, 4, 9.0), small_run(1, 4, 128, 5.0)]
    dates = (LONG_AGO, "2020-02-02T00:00:00+00:00", "2020-03-03T00:00:00+00:00")
    runs = [replace(run, date=date) for run, date in zip(runs, dates, strict=True)]
    assert "| date, commit | 2020-02-02" in table2_laptop_run(runs)
    assert "| date, commit | 2020-03-03" in table2_laptop_equal_run(runs)


def test_the_laptops_speeds_are_told_over_both_bases() -> None:
    runs = [(1, 1, 4, 8.0), (2, 1, 4, 4.0), (2, 4, 16, 10.0), (1, 4, 128, 5.0)]
    records = [small_run(*one) for one in runs]
    growing = cells(table2_laptop(records))
    assert [line[1:] for line in growing] == [
        ["1", "1", "4", "8.0", "2.00", "1.00", "25.0%"],
        ["2", "1", "4", "4.0", "1.00", "0.50", "25.0%"],
        ["2", "4", "16", "10.0", "2.50", "", "25.0%"],
    ]
    assert growing[0][0] == "AmoebaNet-D (6,32)"
    assert cells(table2_laptop_equal(records)) == [["AmoebaNet-D (6,32)", "1", "4", "128", "5.0", "", "1.00", "25.0%"]]


def test_a_speed_up_that_the_law_forbids_is_refused() -> None:
    runs = [small_run(1, 1, 4, 10.0), small_run(2, 1, 4, 11.9), small_run(1, 4, 16, 10.0), small_run(2, 4, 16, 17.8)]
    over_one = [line[6] for line in cells(table2_laptop(runs))]
    assert over_one == ["1.00", "1.00", "1.19", "refused: 1.78, but at most 1.68 is possible"]
    impossible = replace(runs[3], config=runs[3].config | {"pipeline": {**runs[3].config["pipeline"]}})
    impossible.config["pipeline"]["rematerialize"] = "never"
    assert cells(table2_laptop([*runs[:3], impossible]))[3][6] == "1.78"


def test_a_cell_that_was_measured_several_times_shows_its_spread() -> None:
    runs = [
        small_run(1, 1, 4, 10.0),
        *(small_run(2, 1, 4, speed, seed) for seed, speed in enumerate((9.0, 11.0, 12.0))),
    ]
    assert [line[4:7] for line in cells(table2_laptop(runs))] == [
        ["10.0", "0.91", "1.00"],
        ["11.0 (9.0 to 12.0 in 3 runs)", "1.00", "1.10"],
    ]
    again = small_run(1, 1, 4, 8.0, 1)
    assert cells(table2_laptop([*runs, again]))[1][6] == "1.22 (0.90 to 1.50)", "11 over 9, the law allows 1.14"


def test_the_tasks_of_a_real_step_are_told_for_each_model() -> None:
    step = simulate(gpipe(2, 4), lambda task: 0.01)
    events = [
        [event.task.kind, event.task.stage, event.task.micro_batch, event.start, event.end] for event in step.events
    ]
    found = replace(
        small_run(2, 4, 16, 1.0),
        experiment=STEP_TIMELINE.experiment,
        results={"events": events, "num_devices": 2, "partitions": [3, 5]},
    )
    (row,) = cells(step_timeline([found]))
    expected = [f"{step.makespan_seconds * 1e3:.0f}", f"{step.bubble:.1%}"]
    assert row == ["AmoebaNet-D (6,32)", "2", "4", "3 5", *expected]
    assert step_timeline([]) == STEP_TIMELINE.run([]) == "Not run: python -m experiments.step_timeline.\n"


def test_without_records_the_tables_say_what_to_run() -> None:
    assert table2_laptop([]) == "Not run: train.py -m +experiment=table2_throughput_laptop.\n"
    assert table2_laptop_equal([]).endswith("trainer.batch_size=128.\n")
    assert (table2_laptop_run([]), table2_laptop_equal_run([])) == (table2_laptop([]), table2_laptop_equal([]))
    assert SPEED_UPS.planned_run([]) == "Not run: python -m experiments.table2_throughput --plan-only.\n"
    for table in (SPEED_UPS.breakdown, SPEED_UPS.partitions, SPEED_UPS.figures, SPEED_UPS.run):
        assert table([]) == "Not run: python -m experiments.table2_throughput.\n"
