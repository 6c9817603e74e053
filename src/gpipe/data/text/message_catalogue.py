"""Sentence pairs from gettext catalogues, which hold the translations of programs' messages."""

import gettext
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gpipe.data.text.tokenizer import clean_line

Pair = tuple[str, str]  # a sentence, and the same in English
_MAGIC = 0x950412DE
_PLURAL_FORMS = re.compile(r"^plural-forms:.*?plural\s*=\s*([^;\n]+)", re.IGNORECASE | re.MULTILINE)


def parse_plural_rule(header: str) -> Callable[[int], int]:
    """Return the function (number -> index of the plural form) that a catalogue's header, the entry "", defines.

    A header without a rule means the two forms of the Germanic languages, as in gettext's manual.
    """
    found = _PLURAL_FORMS.search(header)
    return gettext.c2py(found[1].strip() if found else "n != 1")


def pair_forms(
    english: str, english_plural: str | None, forms: Mapping[int, str], rule: Callable[[int], int]
) -> Iterator[Pair]:
    """Yield the cleaned pairs of one entry; leave out forms that are empty or equal to the English.

    A form that serves for one thing but not for two belongs to the English singular. Every other form (two, few, many,
    and the only form of Japanese) belongs to the English plural. Placeholders such as %(name)s stay: a translation must
    carry them over. An entry without plural forms has no `english_plural`; `forms` maps indices to translations.
    """
    for index, form in sorted(forms.items()):
        singular = english_plural is None or (index == rule(1) and index != rule(2))
        pair = clean_line(form), clean_line(english if singular else english_plural or "")
        if all(pair) and pair[0] != pair[1]:
            yield pair


def read_mo(path: Path) -> list[Pair]:
    """Return the distinct pairs of a compiled catalogue, in its order.

    Source of the format: gettext's manual, "The Format of GNU MO Files". Two tables hold the (length, offset) of each
    string. In a string, a zero byte separates singular and plural, and a byte 4 ends the context.

    Raises:
        ValueError: the file is damaged.
    """
    data = path.read_bytes()
    try:
        entries = dict(_read_entries(data))
        rule = parse_plural_rule(entries.pop("", ""))
        pairs: dict[Pair, None] = {}
        for key, value in entries.items():
            english, _, plural = key.rpartition("\x04")[2].partition("\0")
            pairs.update(dict.fromkeys(pair_forms(english, plural or None, dict(enumerate(value.split("\0"))), rule)))
    # A plural rule is an expression, which may divide by zero.
    except (struct.error, UnicodeDecodeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{path} is not a compiled gettext catalogue ({error}): unpack its package again") from error
    return list(pairs)


def _read_entries(data: bytes) -> Iterator[Pair]:
    order = "<" if data[:4] == struct.pack("<I", _MAGIC) else ">"
    magic, _, num_entries, originals, translations = struct.unpack_from(f"{order}5I", data)
    if magic != _MAGIC:
        raise ValueError(f"it begins with {data[:4].hex()}")
    num_bytes = 0
    for entry in range(num_entries):
        texts = []
        for table in (originals, translations):
            length, start = struct.unpack_from(f"{order}2I", data, table + 8 * entry)
            if start + length > len(data):
                raise ValueError(f"entry {entry} ends beyond the file's end")
            num_bytes += length
            if num_bytes > len(data):  # a small file could repeat its bytes endlessly
                raise ValueError(f"entry {entry} shares its bytes with others")
            texts.append(data[start : start + length].decode())
        yield texts[0], texts[1]
