"""Plain parallel text and what every corpus refuses: one sentence each, with the place and the remedy."""

import re
from pathlib import Path

import pytest

from gpipe.data import DataMissing, ParallelCorpus, check_data, open_corpus, open_tokenizer
from tests.data.text.small_text import embedded_tokenizer, ids, write_parallel

PAIRS = [("eins", "one"), ("zwei drei", "two three"), ("vier", "four")]
TOKENIZER = embedded_tokenizer()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with German in all splits and French in two."""
    for split in ("train", "valid", "test"):
        write_parallel(tmp_path, split, "de", PAIRS)
    write_parallel(tmp_path, "train", "fr", [("un", "one")])
    write_parallel(tmp_path, "test", "fr", [("un", "one")])
    return tmp_path


def open_text(root: Path, split: str = "train", **settings) -> ParallelCorpus:
    settings = {"tokenizer": TOKENIZER, "languages": ["de"], "max_tokens": 50, **settings}
    return open_corpus("parallel_text", split, root, **settings)


def refused(root: Path, sentence: str, split: str = "train", **settings) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        open_text(root, split, **settings)


def test_lines_are_pairs(root: Path) -> None:
    corpus = open_text(root, languages=None)
    assert corpus.languages == ("de", "fr") and corpus.num_pairs().tolist() == [3, 1] and len(corpus) == 4
    source, target = corpus.pair("de", 1)
    assert (ids(source), ids(target)) == ([*TOKENIZER.encode("zwei drei"), 2], [*TOKENIZER.encode("two three"), 2])
    assert corpus.warnings() == []


def test_the_last_line_may_lack_its_end_and_windows_text_is_read(root: Path) -> None:
    (root / "train.de-en.de").write_bytes("\ufeffeins\r\nzwei drei\r\nvier".encode())
    corpus = open_text(root)
    assert [TOKENIZER.decode(ids(corpus.pair("de", index)[0])) for index in range(3)] == [pair[0] for pair in PAIRS]


def test_a_language_without_data_is_refused(root: Path) -> None:
    refused(
        root,
        "data.languages has 'xx', which the corpus parallel_text does not have: choose among de, fr",
        languages=["de", "xx"],
    )
    refused(
        root,
        "data.languages has 'False', which the corpus parallel_text does not have: write 'no' in quotes, which YAML "
        "reads as false, or choose among de, fr",
        languages=["False"],  # what OmegaConf makes of it
    )
    refused(root, "data.languages is empty, expected codes of languages, or null for all of the corpus's", languages=[])
    check_data("parallel_text", root, languages=["de"])
    with pytest.raises(ValueError, match=r"data\.languages has 'xx'"):
        check_data("parallel_text", root, languages=["xx"])
    with pytest.raises(
        ValueError, match=r"'xx', which .* does not have: choose among af, ak, am, ar, ast, az, be, bg, ... \(102 in"
    ):
        open_corpus("multilingual_embedded", "train", tokenizer=TOKENIZER, languages=["xx"], max_tokens=9)
    missing = root / "valid.fr-en.fr"
    refused(
        root,
        f"{missing} does not exist: each language of parallel text needs this file in every split",
        "valid",
        languages=None,
    )


def test_empty_lines_are_skipped_and_counted(root: Path) -> None:
    write_parallel(root, "train", "de", [PAIRS[0], ("", "two"), ("drei", " \t"), ("", ""), PAIRS[2]])
    corpus = open_text(root)
    assert corpus.num_pairs().tolist() == [2]
    assert corpus.warnings() == [f"skipped 3 pairs with an empty line, the first at {root / 'train.de-en.de'}:2"]
    write_parallel(root, "train", "de", [("", "two")])
    refused(
        root,
        "nothing is left of the language de in the split train of the corpus parallel_text (1 pairs with an empty line "
        "were skipped): leave it out of data.languages, or give it data",
    )
    for side in ("de", "en"):
        (root / f"train.de-en.{side}").write_text("")
    refused(
        root,
        "nothing is left of the language de in the split train of the corpus parallel_text: leave it out of "
        "data.languages, or give it data",
    )


def test_long_lines_are_skipped_and_counted(root: Path) -> None:
    long = "wort " * 60
    write_parallel(root, "train", "de", [PAIRS[0], (long, "two"), PAIRS[2], ("drei", long)])
    corpus = open_text(root)
    place = f"the first at {root / 'train.de-en.de'}:2"
    assert corpus.num_pairs().tolist() == [2]
    assert corpus.warnings() == [f"skipped 2 pairs longer than 50 tokens (data.max_tokens), {place}"]
    assert ids(corpus.pair("de", 1)[1]) == [*TOKENIZER.encode("four"), 2]
    exactly = len(TOKENIZER.encode(long)) + 1
    assert open_text(root, max_tokens=exactly).warnings() == []
    assert len(open_text(root, max_tokens=exactly - 1)) == 2


def test_a_language_of_which_nothing_is_left_is_told_with_its_own_reasons(root: Path) -> None:
    write_parallel(root, "train", "de", [PAIRS[0], ("", "two")])
    start = "nothing is left of the language fr in the split train of the corpus parallel_text"
    write_parallel(root, "train", "fr", [("un " * 60, "one")])
    long = " (1 pairs longer than 50 tokens (data.max_tokens) were skipped)"
    remedy = "leave it out of data.languages, raise data.max_tokens, or give it data"
    refused(root, f"{start}{long}: {remedy}", languages=["de", "fr"])
    for side in ("fr", "en"):
        (root / f"train.fr-en.{side}").write_text("")
    refused(root, f"{start}: leave it out of data.languages, or give it data", languages=["de", "fr"])


def test_files_of_unequal_length_are_refused(root: Path) -> None:
    with (root / "train.de-en.en").open("a") as stream:
        stream.write("five\n")
    german, english = root / "train.de-en.de", root / "train.de-en.en"
    refused(
        root,
        f"{german} has 3 lines, but {english} has 4: lines with the same number must be translations of each other",
    )


def test_what_is_not_utf_8_is_refused_with_its_line(root: Path) -> None:
    (root / "train.de-en.de").write_bytes(b"eins\nzw\xf6lf\nvier\n")
    refused(
        root,
        f"{root / 'train.de-en.de'}:2 is not UTF-8 (byte 3 of the line is 0xf6): convert the file to UTF-8",
    )


def test_other_wrong_settings_are_refused(root: Path) -> None:
    refused(root, "unknown split 'dev': choose one of train, valid, test", "dev")
    with pytest.raises(
        ValueError, match="unknown corpus 'wmt': choose one of multilingual_embedded, multilingual_vlc, par"
    ):
        open_tokenizer("wmt", None)
    assert open_tokenizer("binarized", None) is None
    with pytest.raises(DataMissing, match=r"Looked for: the folder data.root, which is not set"):
        check_data("parallel_text")
    (root / "valid.de-en.en").unlink()
    with pytest.raises(DataMissing, match=r"Looked for: valid.\*-en.en in the folder .*\n.*\n  <data.root>/train"):
        check_data("parallel_text", root)
    refused(root, "max_pairs is 0, expected at least 1, or None for all", max_pairs=0)


def test_a_subset_is_for_training_only_and_a_smaller_one_is_part_of_a_larger_one(root: Path) -> None:
    for split in ("train", "test"):
        write_parallel(root, split, "de", [(f"nummer {number}", f"number {number}") for number in range(20)])
    assert open_text(root, "test", max_pairs=5).num_pairs().tolist() == [20]
    whole = open_text(root)
    everything = [ids(whole.pair("de", index)[0]) for index in range(20)]
    subsets = []
    for most in (3, 8, 99):
        corpus = open_text(root, max_pairs=most)
        subsets.append([everything.index(ids(corpus.pair("de", index)[0])) for index in range(len(corpus))])
        assert len(corpus) == min(most, 20) and subsets[-1] == sorted(subsets[-1])
    assert set(subsets[0]) < set(subsets[1]) < set(subsets[2])


def test_blocks_of_a_large_file_make_one_corpus(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = open_text(root)
    monkeypatch.setattr("gpipe.data.text.parallel_text._BLOCK", 2)
    blocks = open_text(root)
    assert all(ids(blocks.pair("de", index)[0]) == ids(whole.pair("de", index)[0]) for index in range(3))
    assert len(blocks) == 3
