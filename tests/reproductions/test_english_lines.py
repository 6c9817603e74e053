"""Languages with the same English lines count as one, in every interval, and the record of them is the corpus's."""

import lzma
from collections import defaultdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean

import numpy as np

from gpipe.data import SPLITS, open_tokenizer, split_of
from gpipe.records import Record, read_records
from reproductions.corpus import Corpus
from reproductions.english_lines import ENGLISH_LINES, english_lines
from reproductions.figure3_multilingual.depth import deep_or_wide
from reproductions.figure3_multilingual.pairs import BILINGUAL, MULTILINGUAL, fit_gains
from reproductions.figure3_multilingual.tables import claims, figure3_gain, figure3_low_resource
from reproductions.table import newest
from reproductions.translation_runs import DEEP_OR_WIDE
from reproductions.verdict import over_seeds_and_parts
from tests.reproductions.translation_records import cells, scored, trained

ROOT = Path(__file__).parents[2]
CLAIMS = "figure3_multilingual", "table5_batch_size"
DATA = "multilingual_embedded"
SAME = ("cy", "fy", "sw")
ALONE = ("de", "fi", "is")
PAPER = [{"num_layers": layers, "feedforward_size": "1", "num_heads": "1", "parameters": "1B",
          "bleu_read_off_by_third_party": "30.0"} for layers in ("12", "24")]  # fmt: skip


def test_the_committed_records_are_what_the_corpus_has() -> None:
    record, other = (
        newest(read_records(ROOT / "reproductions" / claim / "runs.jsonl"), ENGLISH_LINES.experiment)
        for claim in CLAIMS
    )
    assert record is not None and other is not None and record.results == other.results
    english: dict[str, str] = {}
    pairs: dict[str, dict[str, list[tuple[str, str]]]] = {split: defaultdict(list) for split in SPLITS}
    packed = files("gpipe.data").joinpath("embedded", "multilingual_corpus.tsv.xz").read_bytes()
    for row in lzma.decompress(packed).decode().splitlines():
        language, number, text = row.split("\t")
        if language == "en":
            english[number] = text
        else:
            pairs[split_of(english[number])][language].append((text, english[number]))

    lines = {language: [{line for _, line in pairs[split][language]} for split in SPLITS] for language in pairs["test"]}
    alike = {language: [other for other in lines if lines[other] == lines[language]] for language in lines}
    same = {language: min(others) for language, others in alike.items() if len(others) > 1}
    corpus = Corpus([record], DATA)
    assert len(same) > 1 and corpus.same == same
    for group in record.results["same"]:
        assert list(group["num_lines"].values()) == [len(some) for some in lines[group["languages"][0]]]

    tokenizer, limit = open_tokenizer(DATA, None), record.config["data"]["max_tokens"]
    assert tokenizer is not None
    count_tokens = cache(lambda text: len(tokenizer.encode(text)))  # of an English line once, whatever the languages
    for split in ("valid", "test"):
        numbers, num_read = defaultdict[str, set[int]](set), 0
        for language, some in pairs[split].items():
            read = [both for both in some if all(count_tokens(text) < limit for text in both)]
            for (_, line), number in zip(read, record.results["lines"][split][language], strict=True):
                numbers[line].add(number)
            num_read += len(read)
        assert sorted(numbers.values(), key=min) == [{number} for number in range(len(numbers))], "a number per line"
        said = f"{num_read:,} translations of {len(numbers)} English lines"
        assert corpus.describe_lines(split) == said


def test_every_scored_language_has_as_many_lines_on_record_as_sentences_were_scored() -> None:
    for claim in CLAIMS:
        records = read_records(ROOT / "reproductions" / claim / "runs.jsonl")
        record = newest(records, ENGLISH_LINES.experiment)
        scores = [one for one in records if one.experiment == "bleu" and one.results.get("split", "test") == "test"]
        found = {(name, row["num_sentences"]) for one in scores for name, row in one.results["languages"].items()}
        assert record is not None and found
        assert found <= {(name, len(lines)) for name, lines in record.results["lines"]["test"].items()}


def test_languages_that_repeat_one_column_give_the_interval_of_one() -> None:
    table = np.random.RandomState(0).randn(3, 4)
    one = {seed: dict(zip("abcd", row, strict=True)) for seed, row in enumerate(table)}
    repeated = {seed: {**gains, **{f"a{number}": gains["a"] for number in range(9)}} for seed, gains in one.items()}
    corpus = Corpus([shared(("a", *(f"a{number}" for number in range(9))))], "corpus")
    expected = over_seeds_and_parts(one)
    assert over_seeds_and_parts({seed: corpus.pool(gains) for seed, gains in repeated.items()}) == expected
    assert over_seeds_and_parts(repeated) != expected
    assert corpus.pool({"a": 1.0, "a0": 4.0, "b": 7.0}) == {"a": 2.5, "b": 7.0}
    assert corpus.pool({"a1": 3.0, "a0": 4.0}) == {"a": 3.5}, "the first may be left out"


def shared(*groups: tuple[str, ...]) -> Record:
    """The record of a corpus in which the languages of a group have the same six English lines."""
    same = [{"languages": sorted(group), "num_lines": {"train": 47, "valid": 7, "test": 6}} for group in groups]
    lines = {name: [*range(6)] for group in groups for name in group} | {"de": [0, 7, 7]}
    results = {"same": same, "lines": {"valid": {}, "test": lines}}
    return ENGLISH_LINES.make_record({"data": {"name": "corpus"}}, results)


def compared(languages: tuple[str, ...]) -> list[Record]:
    """A multilingual model and one per language, three seeds. Languages of SAME have the same figures."""
    gains = {name: np.random.RandomState(place).randn(3) for place, name in enumerate((SAME[0], *ALONE))}
    gains |= dict.fromkeys(SAME, gains[SAME[0]])
    pairs = dict.fromkeys(SAME, 40) | dict(zip(ALONE, (100, 200, 300), strict=True))
    records = []
    for seed in range(3):
        of_all = trained(MULTILINGUAL, seed, dict.fromkeys(languages, 2.0))
        records += [of_all, scored(of_all, dict.fromkeys(languages, 20.0), pairs)]
        for name in languages:
            loss = 2.0 + gains[name][seed]
            alone = trained(BILINGUAL, seed, {name: loss}, languages=[name], loss=loss)
            records += [alone, scored(alone, {name: 20.0 - gains[name][seed]}, pairs)]
    return records


def test_every_figure_of_languages_that_are_one_test_is_that_of_one() -> None:
    every = [*compared((*SAME, *ALONE)), shared(SAME)]
    one = compared((SAME[0], *ALONE))
    for table in (figure3_low_resource, figure3_gain):
        several = table(every).replace("6 (counted as 4)", "4").replace("3 (counted as 1)", "1")
        tested = [row[:3] + row[4:] if len(row) == 6 else row for row in cells(several)]  # without how many are tested
        assert tested == [row[:3] + row[4:] if len(row) == 6 else row for row in cells(table(one))]
        assert several != table(every) != table(compared((*SAME, *ALONE)))
    assert [claim.verdict for claim in claims(every, PAPER)] == [claim.verdict for claim in claims(one, PAPER)]
    assert claims(every, PAPER)[1].measured.startswith(
        "gain on 6 languages (counted as 4) with 40 to 300 training pairs: "
    )
    ((_, line), *_), ((_, expected), *_) = (
        list(fit_gains(some, "T(2, 256, 4), 64 wide, corpus").values()) for some in (every, one)
    )
    assert line is not None and expected is not None and line.loss_per_doubling == expected.loss_per_doubling


def test_the_study_of_depth_counts_them_as_one_too() -> None:
    def records(languages: tuple[str, ...]) -> list[Record]:
        runs = [
            trained(DEEP_OR_WIDE, seed, {name: loss + seed / 8 + (name in SAME) for name in languages}, shape=shape)
            for seed in range(3)
            for shape, loss in (((2, 256, 8), 2.0 + seed / 10), ((4, 128, 4), 3.0))  # no tie in rounding
        ]
        return [*runs, *(scored(run, dict.fromkeys(languages, 10.0), dict.fromkeys(languages, 9)) for run in runs)]

    several = [
        row for row in cells(deep_or_wide([*records((*SAME, *ALONE)), shared(SAME)])) if row[1].startswith("all")
    ]
    one = [row for row in cells(deep_or_wide(records((SAME[0], *ALONE)))) if row[1].startswith("all")]
    assert several[0][1] == "all, 6 (counted as 4)"
    assert [row[2:] for row in several] == [row[2:] for row in one]


def test_the_page_names_the_languages_and_without_a_record_each_counts() -> None:
    record = shared(("sw", "cy"))
    assert english_lines([record]) == (
        "cy, sw: these 2 languages have the same English lines, 47 (train), 7 (valid), 6 (test). They count as one.\n"
    )
    corpus = Corpus([record], "a model, corpus")
    assert corpus.count(["cy", "sw", "de"]) == 2 and Corpus([record], "another").count(["cy", "sw", "de"]) == 3
    assert corpus.describe_lines("test", ["sw", "cy", "de"]) == "15 translations of 7 English lines"
    assert Corpus([], "corpus").describe_lines("test") == ""
    assert english_lines([]) == "Not run: python -m experiments.english_lines.\n"
    assert [corpus.describe_number(names) for names in (["de"], ["cy", "de"], ["cy", "sw", "de"])] == [
        "1", "2", "3 (counted as 2)",
    ]  # fmt: skip
    assert corpus.describe_number(["sw"], "language") == "1 language"
    assert fmean(corpus.pool({"sw": 1.0, "cy": 3.0, "de": 4.0}).values()) == 3.0
