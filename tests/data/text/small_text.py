"""Small tokenizers, catalogues and parallel text for the tests."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gpipe.data import LanguagePairs, ParallelCorpus, open_tokenizer
from gpipe.data.text.sentences import Sentences
from gpipe.data.text.tokenizer import Tokenizer


def embedded_tokenizer() -> Tokenizer:
    tokenizer = open_tokenizer("multilingual_embedded", None)
    assert tokenizer is not None
    return tokenizer


def write_mo(path: Path, entries: Mapping[str, str], order: str = "<") -> None:
    """Write a compiled catalogue as the manual of gettext draws it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tables, texts = [b"", b""], b""
    start = 28 + 16 * len(entries)
    for side, strings in enumerate((list(entries), list(entries.values()))):
        for string in strings:
            data = string.encode()
            tables[side] += struct.pack(f"{order}2I", len(data), start + len(texts))
            texts += data + b"\0"
    header = struct.pack(f"{order}7I", 0x950412DE, 0, len(entries), 28, 28 + 8 * len(entries), 0, 0)
    path.write_bytes(header + tables[0] + tables[1] + texts)


def write_parallel(folder: Path, split: str, language: str, pairs: Sequence[tuple[str, str]]) -> None:
    for side, texts in zip((language, "en"), zip(*pairs, strict=True), strict=True):
        (folder / f"{split}.{language}-en.{side}").write_text("".join(f"{text}\n" for text in texts), "utf-8")


def made_up_corpus(lengths: Mapping[str, Sequence[tuple[int, int]]]) -> ParallelCorpus:
    """Return a corpus of pairs with these lengths (without END); every token says which sentence it is in."""
    number = 10
    pairs = {}
    for language, sizes in lengths.items():
        sides: tuple[list[list[int]], list[list[int]]] = ([], [])
        for size in sizes:
            for side, length in zip(sides, size, strict=True):
                side.append([number] * length)
                number += 1
        pairs[language] = LanguagePairs(*(Sentences.pack(side, 60_000) for side in sides))
    return ParallelCorpus(pairs, 60_000)


def ids(array: np.ndarray) -> list[int]:
    return [int(number) for number in array]
