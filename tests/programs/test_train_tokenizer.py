"""The vocabulary of one's own text."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gpipe.data import Tokenizer
from gpipe.programs import bleu, train_tokenizer


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


@pytest.mark.parametrize(
    ("main", "defaults"), [(train_tokenizer.main, ["64000", "100000"]), (bleu.main, ["test", "4"])], ids=["it", "bleu"]
)
def test_the_help_names_the_defaults(
    main: Callable[[list[str]], None], defaults: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert set(defaults) <= set(re.findall(r"default:\s+(\w+)", capsys.readouterr().out))
