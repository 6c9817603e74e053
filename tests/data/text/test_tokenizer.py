"""The tokenizer: exact round trips, fairseq's ids, training that repeats itself, and refusals."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe._compat.fairseq import import_fairseq
from gpipe.data import Tokenizer
from gpipe.data.text.multilingual_text import read_embedded
from gpipe.data.text.tokenizer import BEGIN, END, NUM_SPECIAL, PADDING, UNKNOWN, clean_line
from tests.data.text.small_text import embedded_tokenizer

TOKENIZER = embedded_tokenizer()
LINES = [pair.target for pair in read_embedded()["de"]]


@settings(deadline=None, derandomize=True)
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="▁")))
def test_every_text_comes_back_with_single_spaces(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert all(NUM_SPECIAL <= number < TOKENIZER.vocabulary_size for number in ids)
    assert TOKENIZER.decode(ids) == clean_line(text)


@pytest.mark.parametrize("language", ["ar", "am", "fa", "km", "ml", "zh"])
def test_every_embedded_line_comes_back(language: str) -> None:
    lines = [pair.source for pair in read_embedded()[language]]
    assert [TOKENIZER.decode(ids) for ids in TOKENIZER.encode_lines(lines)] == lines


def test_special_tokens_have_no_text() -> None:
    ids = TOKENIZER.encode("Log in")
    assert TOKENIZER.decode([BEGIN, END, *ids, END, PADDING, PADDING, UNKNOWN]) == "Log in"
    assert TOKENIZER.pieces()[:4] == ["<s>", "<pad>", "</s>", "<unk>"]


@pytest.mark.parametrize("number", [-1, TOKENIZER.vocabulary_size, 10**12])
def test_an_id_without_a_piece_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=rf"^the id {number} is not one of .*\.model, expected 0 to 3999: use the tok"):
        TOKENIZER.decode([END, number])


def test_ids_are_those_of_fairseqs_dictionary_with_the_same_pieces(tmp_path: Path) -> None:
    TOKENIZER.write_dictionary(tmp_path / "dict.txt")
    dictionary = import_fairseq("fairseq.data").Dictionary.load(str(tmp_path / "dict.txt"))
    assert dictionary.symbols == TOKENIZER.pieces()
    assert [dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk()] == [BEGIN, PADDING, END, UNKNOWN]


def test_the_same_lines_give_the_same_file(tmp_path: Path) -> None:
    first, second = (Tokenizer.train(LINES, 500, tmp_path / name) for name in ("a.model", "b.model"))
    assert first.path.read_bytes() == second.path.read_bytes() and first.sha256 == second.sha256
    assert first.vocabulary_size == 500
    assert Tokenizer.train(LINES[1:], 500, tmp_path / "c.model").sha256 != first.sha256


@pytest.mark.parametrize(
    "line", ["zqzq " * 300_000, "zqzq" * 300_000, "zqzq \u2585 zqzq " * 20_000], ids=["long", "one word", "reserved"]
)
def test_no_line_is_left_out_of_the_training(tmp_path: Path, line: str) -> None:
    assert any("zqzq" in piece for piece in Tokenizer.train([*LINES, line], 320, tmp_path / "a.model").pieces())


def test_a_vocabulary_that_the_lines_cannot_fill_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^these lines .* 9000 tokens, more than .*, expected at most \d+: lower it"):
        Tokenizer.train(["one line"], 9000, tmp_path / "a.model")
    with pytest.raises(ValueError, match=r"^these lines cannot make a vocabulary of 500 .* or give more text.$"):
        Tokenizer.train([], 500, tmp_path / "a.model")
    with pytest.raises(ValueError, match=r"^these lines .* 20 tokens, fewer than .*, expected at least \d+: raise it"):
        Tokenizer.train(LINES, 20, tmp_path / "a.model")
    assert not (tmp_path / "a.model").exists()
    before = Tokenizer.train(LINES, 500, tmp_path / "a.model").sha256

    def broken() -> Iterator[str]:
        yield LINES[0]
        raise OSError("the disk is gone")

    with pytest.raises(ValueError, match="these lines cannot make a vocabulary of 9000 tokens"):
        Tokenizer.train(["one line"], 9000, tmp_path / "a.model")
    with pytest.raises(OSError, match="the disk is gone"):
        Tokenizer.train(broken(), 500, tmp_path / "a.model")
    assert Tokenizer(tmp_path / "a.model").sha256 == before


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.model does not exist: set data.tokenizer="):
        Tokenizer(tmp_path / "none.model")
    for content in (b"", b"text", b"\x00" * 99):
        (tmp_path / "bad.model").write_bytes(content)
        with pytest.raises(ValueError, match=r"bad.model is not a SentencePiece model"):
            Tokenizer(tmp_path / "bad.model")


def test_other_special_ids_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "other.model").open("wb") as stream:  # SentencePiece's own choice of ids
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES), model_writer=stream, vocab_size=300, minloglevel=2
        )
    with pytest.raises(
        ValueError,
        match=r"other.model has the special ids \[1, -1, 2, 0\], expected \[0, 1, 2, 3\] for bos, pad, eos and unk: ",
    ):
        Tokenizer(tmp_path / "other.model")


def test_a_device_without_an_end_is_no_tokenizer() -> None:
    with pytest.raises(ValueError, match="/dev/zero is not a SentencePiece model"):
        Tokenizer("/dev/zero")
