"""Figure 3: the paper's models, and one multilingual model beside bilingual ones, seed by seed."""

from statistics import stdev

from experiments import translation_parameters
from gpipe.decoding.resource_groups import resource_groups
from gpipe.records import Record, make_record
from reproductions.figure3_multilingual.pairs import BILINGUAL, MULTILINGUAL
from reproductions.figure3_multilingual.tables import (
    claims,
    figure3_beams,
    figure3_design,
    figure3_gain,
    figure3_languages,
    figure3_left_out,
    figure3_limits,
    figure3_low_resource,
    figure3_models,
    figure3_run,
    figure3_search,
)
from reproductions.table import rounds_to
from reproductions.translation_runs import DEEP_OR_WIDE, PARAMETERS, trainings
from tests.reproductions.paper_scale_records import composed
from tests.reproductions.translation_records import cells, scored, trained

PAIRS = {"sw": 100, "de": 900, "cy": 300}
PAPER = [
    {"num_layers": "6", "feedforward_size": "8192", "num_heads": "16", "num_stages": "1", "parameters": "400M",
     "bleu_read_off_by_third_party": "30.4"},
    {"num_layers": "24", "feedforward_size": "8192", "num_heads": "16", "num_stages": "4", "parameters": "1.3B",
     "bleu_read_off_by_third_party": "34.3"},
]  # fmt: skip


def plan() -> Record:
    models = [
        {"num_layers": num_layers, "feedforward_size": 8192, "num_heads": 16, "model_size": 1024, "num_stages": stages,
         "parameters": parameters, "parameter_bytes": 4 * parameters,
         "parameters_by_tables": {"1": parameters - 10**8, "2": parameters, "3": parameters + 10**8}}
        for num_layers, stages, parameters in ((6, 1, 408_000_000), (24, 4, 1_302_000_000))
    ]  # fmt: skip
    results = {"models": models, "laptop": []}
    return make_record(kind="planned", command="c", experiment=PARAMETERS, config={}, seed=0, results=results)


def pair(seed: int, one: float, other: float) -> list[Record]:
    """A multilingual model, and bilingual ones of two languages with these losses."""
    return [
        trained(MULTILINGUAL, seed, {"sw": 2.0, "cy": 3.0, "de": 1.0}),
        trained(BILINGUAL, seed, {"sw": one}, languages=["sw"], least_loss={"loss": one, "sw/loss": one, "step": 10}),
        trained(BILINGUAL, seed, {"cy": other}, languages=["cy"]),
    ]


def test_parameters_stand_beside_the_papers_and_what_was_not_run_says_so() -> None:
    small, deep = cells(figure3_models([plan()], PAPER))
    counts = ["308,000,000", "408,000,000", "508,000,000"]
    assert small == ["T(6, 8192, 16)", "400M", *counts, "2", "1", "1.52", "30.4", "not run"]
    assert deep[5:7] == ["2", "4"]


def test_a_model_of_the_papers_size_has_its_mean_bleu_over_the_languages() -> None:
    figures = {"evaluation": {"valid": {"loss": 2.5}}}
    run = composed("+experiment=transformer_multilingual", "model=translation_t24_8192_16", **figures)
    records = [plan(), run, scored(run, {"de": 60.0, "sw": 20.0}, PAIRS)]
    assert [row[-1] for row in cells(figure3_models(records, PAPER))] == ["not run", "20.0"]


def test_the_multilingual_model_stands_beside_the_bilingual_ones_of_its_seed() -> None:
    records = [*pair(0, 3.0, 2.5), *pair(1, 4.0, 3.5), trained(BILINGUAL, 7, {"sw": 1.0}, languages=["sw"])]
    loss = [row for row in cells(figure3_low_resource(records)) if row[0].startswith("lowest loss")]
    assert loss[0] == ["lowest loss, nats per token", "0", "2", "2.750", "2.500", "-0.250", "1", ""]
    assert loss[1] == ["lowest loss, nats per token", "1", "2", "3.750", "2.500", "-1.250", "2", ""]
    spread = f"3.250 ± {stdev((2.75, 3.75)):.3f}"
    assert (
        loss[2][1:5] == ["all 2", "", spread, "2.500 ± 0.000"]
        and loss[2][-2] == "1.5"
        and loss[2][-1].startswith("no difference found [-")
    )
    steps = [row for row in cells(figure3_low_resource(records)) if row[0].startswith("steps")]
    assert steps[0][3:] == ["155", "300", "+145", "", ""], "a bilingual model is judged at its own best evaluation"


def test_the_design_counts_the_trainings_that_are_compared_and_no_further_seed() -> None:
    records = [
        *pair(0, 3.0, 2.5),
        *pair(1, 4.0, 3.5),
        *(trained(MULTILINGUAL, seed, {"sw": 2.0}) for seed in (2, 3, 4)),
    ]
    alone, of_all = [row for row in cells(figure3_design(records)) if row[0].startswith("is one model")]
    compared = [row[1] for row in cells(figure3_low_resource(records)) if row[0].startswith("lowest loss")]
    assert compared == ["0", "1", "all 2"] and (alone[2:4], of_all[2:4]) == (["4", "2"], ["2", "2"])


def test_the_verdict_follows_from_seeds_and_languages() -> None:
    alike = [record for seed in range(3) for record in pair(seed, 3.0 + seed / 100, 4.0)]
    (judged,) = (row[-1] for row in cells(figure3_low_resource(alike)) if row[1] == "all 3" and row[-1])
    assert judged.startswith("reproduced [+")
    records = [*pair(0, 3.0, 2.5), *pair(1, 1.0, 1.0)]
    table = cells(figure3_low_resource(records))
    assert [row[-1].partition(" [")[0] for row in table if row[1] == "all 2"] == ["no difference found", ""]
    assert [row[-1] for row in table if row[0] == "chrF"] == ["not run: bleu.py"]


def test_scores_of_both_are_compared_and_a_diverged_training_is_left_out() -> None:
    runs = pair(0, 3.0, 2.5)
    broken = trained(BILINGUAL, 0, {}, languages=["de"], evaluation={}, failure="the loss of step 3 is nan")
    records = [
        *runs, broken,
        scored(runs[0], {"sw": 20.0, "cy": 40.0}, PAIRS), scored(runs[1], {"sw": 30.0}, PAIRS),
        scored(runs[2], {"cy": 20.0}, PAIRS),
    ]  # fmt: skip
    chrf = [row for row in cells(figure3_low_resource(records)) if row[0].startswith("chrF")]
    assert chrf[0] == ["chrF, beam 4", "0", "2", "25.00", "30.00", "+5.00", "1", ""]
    assert chrf[1][-1] == "one seed has no interval"
    languages = cells(figure3_languages(records))
    assert languages == [
        ["sw", "100", "100", "1", "3.000", "2.000", "30.0", "20.0", "15.0", "10.0"],
        ["cy", "300", "100", "1", "2.500", "3.000", "20.0", "40.0", "10.0", "20.0"],
    ]


def test_scores_of_every_beam_are_compared_and_the_languages_show_the_narrowest() -> None:
    one, two, _ = pair(0, 3.0, 2.5)
    found = [scored(run, {"sw": chrf}, PAIRS, beam) for run, beam, chrf in (
        (one, 4, 10.0), (two, 4, 12.0), (one, 1, 30.0), (two, 1, 20.0), (one, 4, 11.0)
    )]  # fmt: skip
    table = cells(figure3_low_resource([one, two, *found]))
    assert [row[:5] for row in table if row[0].startswith("chrF") and row[1] == "0"] == [
        ["chrF, greedy", "0", "1", "20.00", "30.00"],
        ["chrF, beam 4", "0", "1", "12.00", "11.00"],
    ]
    assert cells(figure3_languages([one, two, *found]))[0][6:] == ["20.0", "30.0", "10.0", "15.0"]


def test_both_searches_and_the_choice_of_a_beam_are_shown() -> None:
    alone = [
        trained(BILINGUAL, 0, {}, languages=["sw"], rate=rate, loss=loss) for rate, loss in ((0.5, 2.0), (1.0, 3.0))
    ]
    of_all = [trained(DEEP_OR_WIDE, 0, {}, rate=rate, loss=loss) for rate, loss in ((0.5, 1.5), (1.0, 1.25))]
    other = trained(DEEP_OR_WIDE, 0, {}, rate=0.5, loss=0.5, shape=(4, 128, 4))
    assert cells(figure3_search([*alone, *of_all, other])) == [
        ["one per language", "0.5", "0.25", "1", "2.0000", "yes"],
        ["one per language", "1", "0.25", "1", "3.0000", ""],
        ["one of all", "1", "0.25", "1", "1.2500", "yes"],
        ["one of all", "0.5", "0.25", "1", "1.5000", ""],
    ]
    run, languages = trained(BILINGUAL, 0, {}, languages=["cy"]), ("sw", "cy")
    valid = [scored(alone[0], {"sw": chrf}, PAIRS, beam, split="valid") for beam, chrf in ((1, 10.0), (2, 12.0))]
    valid += [scored(run, {"cy": chrf}, PAIRS, beam, split="valid") for beam, chrf in ((1, 30.0), (2, 20.0))]
    valid += [scored(of_all[0], dict.fromkeys(languages, 5.0), PAIRS, 1, split="valid")]
    assert cells(figure3_beams(valid)) == [
        ["one per language", "greedy", "2", "20.00", "yes"],
        ["one per language", "beam 2", "2", "16.00", ""],
        ["one of all", "greedy", "2", "5.00", "yes"],
    ]


def test_languages_of_a_small_test_set_are_left_out_of_a_second_table_and_claim_and_the_page_says_so() -> None:
    records = [record for seed in range(2) for record in pair(seed, 3.0, 2.5)]
    few = [scored(run, {"sw": 30.0, "cy": 20.0, "de": 1.0}, PAIRS, sentences={"sw": 49, "cy": 50}) for run in records]
    every, tested = map(cells, figure3_low_resource([*records, *few]).split("\n\n"))
    assert every[0] == ["lowest loss, nats per token", "0", "2", "2.750", "2.500", "-0.250", "1", ""]
    assert tested[0] == ["lowest loss, nats per token", "0", "1", "2.500", "3.000", "+0.500", "0", ""]
    assert (
        "1 of 2 languages have fewer than 50 test sentences and are left out of the second table: sw. The 1 have "
        in (said := figure3_left_out([*records, *few]))
    )
    assert said.endswith("The 1 have 100 training pairs, the other 1 have 300 training pairs.\n")
    every, claim = claims([*records, *few], PAPER)[1:3]
    assert every.scope.endswith("all languages that have both models") and claim.scope.endswith(
        "50 test sentences or more"
    )
    assert every.measured.startswith(
        "gain on 2 languages with 100 to 300 training pairs: lowest loss, nats per token +0.250"
    )
    assert "no difference found [" in every.verdict
    assert (
        claim.measured.startswith("gain on 1 language with 300 training pairs: lowest loss, nats per token -0.500")
        and "contradicted [-0.5" in claim.verdict
    )


def test_the_gain_is_shown_by_the_number_of_pairs_with_all_languages() -> None:
    # The multilingual model is better by 1 on the language of 100 pairs, worse by 1 on that of 300.
    records = [record for seed in range(2) for record in pair(seed, 3.0, 2.0)]
    scores = [scored(run, {"sw": 30.0, "cy": 20.0}, PAIRS, sentences={"sw": 5}) for run in records]
    ranges, lines = figure3_gain([*records, *scores]).split("\n\n")
    loss = [row for row in cells(ranges) if row[0].startswith("lowest loss")]
    assert [row[1:5] for row in loss] == [["100 to 249", "1", "0", "+1.000"], ["250 to 499", "1", "1", "-1.000"]]
    alone = "one language: over seeds alone"
    assert loss[0][-1].startswith(f"{alone} [+1.0") and loss[1][-1].startswith(f"{alone} [-1.0")
    row = cells(lines)[0]
    assert row[1].startswith("+1.000 at 100") and row[2].startswith("-1.000 at 300")
    assert row[3] == "173 pairs", "the geometric mean of 100 and 300"
    falls = claims([*records, *scores], PAPER)[3]
    assert falls.measured.startswith("lowest loss, nats per token: changes sign at 173 pairs")


def test_a_claim_over_all_languages_leaves_none_out_and_writes_each_figure_in_its_own_form() -> None:
    # The gain in loss is 1/64 on each of two languages, the one of which has five test sentences; chrF gains 1 on both.
    runs = [
        record
        for seed in range(3)
        for record in (
            trained(MULTILINGUAL, seed, {"sw": 2.0 + seed, "cy": 3.0}),
            trained(BILINGUAL, seed, {"sw": 2.0 + seed + 1 / 64}, languages=["sw"]),
            trained(BILINGUAL, seed, {"cy": 3.0 + 1 / 64}, languages=["cy"]),
        )
    ]
    scores = [
        scored(run, dict.fromkeys(run.config["data"]["languages"] or PAIRS, chrf), PAIRS, sentences={"sw": 5})
        for run in runs
        for chrf in [10.0 if run.config["data"]["languages"] else 11.0]
    ]
    every = claims([*runs, *scores], PAPER)[1]
    assert every.measured.startswith(
        "gain on 2 languages with 100 to 300 training pairs: lowest loss, nats per token +"
    )
    assert every.verdict.split("; ")[:2] == [
        "lowest loss, nats per token: reproduced [+0.016, +0.016]",
        "chrF, beam 4: reproduced [+1.00, +1.00]",
    ]
    without = claims(runs, PAPER)
    assert [claim.scope.partition(": ")[2] for claim in without[1:3]] == ["all languages that have both models", ""], (
        "once"
    )


def test_trainings_with_their_least_loss_at_the_last_step_are_counted_by_limit() -> None:
    def stopped(experiment: str, language: str | None, step: int, limit: int) -> Record:
        best = {"loss": 1.0, "sw/loss": 1.0, "cy/loss": 1.0, "step": step}
        languages = None if language is None else [language]
        return trained(experiment, 0, {"sw": 1.0, "cy": 1.0}, languages=languages, least_loss=best, max_steps=limit)

    records = [
        stopped(MULTILINGUAL, None, 900, 1000),
        stopped(BILINGUAL, "sw", 600, 600),
        stopped(BILINGUAL, "cy", 500, 600),
        stopped(BILINGUAL, "de", 600, 600),  # which the multilingual model has no loss of
    ]
    assert cells(figure3_limits(records)) == [
        ["all languages", "bilingual", "600", "2", "1"],
        ["all languages", "multilingual", "1,000", "1", "0"],
    ]


def test_of_two_trainings_alike_the_later_counts_with_its_scores() -> None:
    old, new = trained(MULTILINGUAL, 0, {}, loss=2.0), trained(MULTILINGUAL, 0, {}, loss=1.0)
    (found,) = trainings([old, new, scored(old, {"sw": 1.0}, PAIRS), scored(new, {"sw": 2.0}, PAIRS)], MULTILINGUAL)
    assert (found.best("loss"), found.score("chrf", "sw")) == (1.0, 2.0)


def test_the_larger_half_of_the_languages_is_rich() -> None:
    groups = resource_groups(PAIRS)
    assert groups == {"all": ["de", "cy", "sw"], "high": ["de", "cy"], "low": ["sw"]}


def test_without_records_the_tables_say_what_to_run() -> None:
    assert figure3_models([], PAPER) == "Not run: python -m experiments.translation_parameters.\n"
    for table in (figure3_low_resource, figure3_left_out, figure3_limits, figure3_gain, figure3_languages, figure3_run):
        assert table([]).startswith("Not run: python -m experiments.multilingual")


def test_our_counts_round_to_the_papers_with_no_single_way_of_tying() -> None:
    # By hand: an encoder layer has one attention and two norms, a decoder layer two and three; everything has biases.
    paper = {6: "400M", 12: "1.3B", 24: "1.3B", 32: "3B", 64: "6B"}
    agreeing = {6: [2], 12: [3], 24: [3], 32: [1, 2, 3], 64: [1, 2, 3]}
    for row in translation_parameters.count_paper_models():
        width, channels, hidden = 1024, 64 * row["num_heads"], row["feedforward_size"]
        attention = 4 * width * channels + 3 * channels + width
        feedforward = 2 * width * hidden + hidden + width
        layers = row["num_layers"] * (3 * attention + 2 * feedforward + 5 * 2 * width)
        assert row["parameters_beside_tables"] == layers + 2 * 2 * width
        counts = {tables: layers + 2 * 2 * width + tables * 64_000 * width for tables in (1, 2, 3)}
        assert row["parameters_by_tables"] == {str(tables): count for tables, count in counts.items()}
        rounding = [tables for tables, count in counts.items() if rounds_to(count, paper[row["num_layers"]])]
        assert rounding == agreeing[row["num_layers"]]
    sizes = {row["num_layers"]: row["parameters_beside_tables"] for row in translation_parameters.count_laptop_models()}
    assert list(sizes) == [1, 2, 4, 8, 16]
    assert abs(sizes[4] / sizes[2] - 1) < 0.01
    assert max(sizes.values()) / min(sizes.values()) < 1.05, "norms and biases alone grow with the depth"
