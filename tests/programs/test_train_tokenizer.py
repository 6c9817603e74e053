"""The vocabulary of one's own text."""

import itertools
from pathlib import Path

import pytest

from gpipe.data import Tokenizer
from gpipe.programs import train_tokenizer


def test_it_has_the_pieces_of_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = {"de": "das Haus ist sehr alt\n", "en": "the house is very old\n"}
    for split, language in itertools.product(("train", "valid", "test"), sides):
        (tmp_path / f"{split}.de-en.{language}").write_text(sides[language] * 20, encoding="utf-8")
    train_tokenizer.main([str(tmp_path), "--vocabulary-size", "300"])
    tokenizer = Tokenizer(tmp_path / "tokenizer.model")
    assert tokenizer.sha256 in capsys.readouterr().out
    for text in sides.values():
        assert tokenizer.decode(tokenizer.encode(text.strip())) == text.strip()


def test_a_folder_without_text_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_tokenizer.main([str(tmp_path / "nothing")])
    said = capsys.readouterr().err
    assert said.startswith("error: ") and str(tmp_path / "nothing") in said and "Traceback" not in said
