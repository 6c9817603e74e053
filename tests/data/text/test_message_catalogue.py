"""Catalogues of gettext: compiled ones against the standard library's reader, and which form means what."""

import gettext
from pathlib import Path

import pytest

from gpipe.data.text.message_catalogue import pair_forms, parse_plural_rule, read_mo
from tests.data.text.small_text import write_mo

RUSSIAN = (
    "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && "
    "n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2);\n"
)
ARABIC = "Plural-Forms: nplurals=4; plural=n==0 ? 0 : n==1 ? 1 : n==2 ? 2 : 3;\n"


def pairs(header: str, *forms: str) -> list[tuple[str, str]]:
    return list(pair_forms("%d day", "%d days", dict(enumerate(forms)), parse_plural_rule(header)))


def test_a_form_goes_with_the_english_number_that_it_means() -> None:
    assert pairs("", "a", "b") == [("a", "%d day"), ("b", "%d days")]
    assert pairs(RUSSIAN, "a", "b", "c") == [("a", "%d day"), ("b", "%d days"), ("c", "%d days")]
    assert pairs(ARABIC, "none", "one", "two", "many")[:2] == [("none", "%d days"), ("one", "%d day")]
    assert pairs("Plural-Forms: nplurals=1; plural=0;\n", "a") == [("a", "%d days")]


def test_what_is_empty_or_untranslated_is_no_pair_and_white_space_is_one_space() -> None:
    assert list(pair_forms("a", None, {0: ""}, parse_plural_rule(""))) == []
    assert list(pair_forms("OK", None, {0: " OK\n"}, parse_plural_rule(""))) == []
    assert list(pair_forms("  a\n b", None, {0: "c\u00a0 d\t%(name)s"}, parse_plural_rule(""))) == [
        ("c d %(name)s", "a b")
    ]


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_compiled_catalogue_reads_as_the_standard_library_reads_it(tmp_path: Path, order: str) -> None:
    path = tmp_path / "vlc.mo"
    entries = {"": RUSSIAN, "Open": "Открыть", "menu\x04Play": "Играть", "%d day\0%d days": "день\0дни\0днями"}
    write_mo(path, entries, order)
    with path.open("rb") as stream:
        theirs = gettext.GNUTranslations(stream)
    assert read_mo(path) == [
        (theirs.gettext("Open"), "Open"),
        (theirs.pgettext("menu", "Play"), "Play"),
        (theirs.ngettext("%d day", "%d days", 1), "%d day"),
        (theirs.ngettext("%d day", "%d days", 2), "%d days"),
        (theirs.ngettext("%d day", "%d days", 5), "%d days"),
    ]


def test_a_damaged_catalogue_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "vlc.mo"
    write_mo(path, {"Open": "Öffnen"})
    whole = path.read_bytes()
    for damaged in (b"", b"not a catalogue, but long enough", whole[:-4], whole[:30]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"vlc.mo is not a compiled gettext catalogue \(.*\): unpack its package"):
            read_mo(path)
