"""Text binarised by fairseq-preprocess: fairseq reads the dictionary, and the files of ids are mapped into memory."""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpipe._compat.fairseq import VERSION, import_fairseq
from gpipe.data.text.parallel_corpus import TARGET_LANGUAGE, LanguagePairs, Skipped
from gpipe.data.text.parallel_text import describe_long, find_files
from gpipe.data.text.sentences import Sentences, find_starts
from gpipe.data.text.token_cache import CachedPairs, open_cached
from gpipe.data.text.tokenizer import BEGIN, END, PADDING, UNKNOWN

_MAGIC = b"MMIDIDX\x00\x00"  # of the index of fairseq's mmap format
_HEADER = struct.Struct("<9sQBQ")  # magic, version, kind of number, number of sentences
# fairseq's codes of integer types (data/indexed_dataset.py).
_INTEGERS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}
_ENTRY_BYTES = 4 + 8  # a sentence's length and its start
_FILES = (".bin", ".idx"), "binarise it again, with --dataset-impl mmap"  # what `find_files` takes
_BLOCK = 1 << 17  # sentences to read at a time


def read_dictionary(root: Path, languages: Sequence[str]) -> list[str]:
    """Return the symbols of the vocabulary that all languages share, in the order of their ids."""
    joined: list[str] | None = None
    for language in (TARGET_LANGUAGE, *languages):
        path = root / f"dict.{language}.txt"
        if not path.is_file():
            raise ValueError(f"{path} does not exist: fairseq-preprocess writes it beside the binarised text")
        reader: Any = import_fairseq("fairseq.data").Dictionary
        try:
            dictionary = reader.load(str(path))
        except Exception as error:  # it raises ValueError, RuntimeError and plain Exception
            raise ValueError(f"{path} is not a fairseq dictionary ({error}): binarise again") from error
        special = [dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk()]
        if special != [BEGIN, PADDING, END, UNKNOWN]:
            raise ValueError(f"{path} has the special ids {special}, expected 0 to 3: make it with fairseq {VERSION}")
        if joined is None:
            joined = list(dictionary.symbols)
        elif joined != dictionary.symbols:
            raise ValueError(
                f"{path} differs from dict.{TARGET_LANGUAGE}.txt, but one vocabulary must serve both sides and all "
                "languages: binarise with --joined-dictionary, or with one --srcdict and --tgtdict for all pairs"
            )
    assert joined is not None
    return joined


def read_binarized_blocks(root: Path, split: str, language: str, vocabulary_size: int) -> Iterator[LanguagePairs]:
    """Yield the pairs <split>.<language>-en in blocks. All blocks share the mapped .bin files."""
    source, target, source_index, target_index = find_files(root, split, language, *_FILES)
    (_, num_sources), (_, num_targets) = _read_header(source_index), _read_header(target_index)
    if num_sources != num_targets:
        raise ValueError(
            f"{root / f'{split}.{language}-{TARGET_LANGUAGE}'} has {num_sources:,} sentences in {language} and "
            f"{num_targets:,} in {TARGET_LANGUAGE}: binarise it again"
        )
    sides = (_read_side(*files, vocabulary_size) for files in ((source, source_index), (target, target_index)))
    return (LanguagePairs(*blocks) for blocks in zip(*sides, strict=True))


def open_binarized(
    cache: Path, root: Path, split: str, language: str, vocabulary_size: int, max_tokens: int
) -> CachedPairs:
    """Open a binarised language, whose ids stay in its .bin files; check every id the first time."""

    def read() -> Iterator[LanguagePairs]:
        num_read = 0
        for block in read_binarized_blocks(root, split, language, vocabulary_size):
            fits = np.maximum(block.sources.lengths, block.targets.lengths) <= max_tokens
            place = f"{root / f'{split}.{language}-en'}:{num_read + int(np.argmin(fits)) + 1}"
            skipped = Skipped()
            skipped.add(describe_long(max_tokens), int(np.count_nonzero(~fits)), place)
            yield block.select(np.flatnonzero(fits), skipped)
            num_read += len(block)

    *bins, source_index, target_index = files = find_files(root, split, language, *_FILES)
    settings = {"vocabulary_size": vocabulary_size, "max_tokens": max_tokens}
    tokens = [(path, _read_header(index)[0]) for path, index in zip(bins, (source_index, target_index), strict=True)]
    return open_cached(cache, f"{split}.{language}-en", files, settings, read(), tokens)


def _read_side(path: Path, index: Path, vocabulary_size: int) -> Iterator[Sentences]:
    """Yield the sentences of one side of a language in blocks, and check everything."""
    kind, num_sentences = _read_header(index)
    num_bytes = path.stat().st_size
    contradiction = ValueError(f"{path} has {num_bytes:,} bytes, which its index contradicts: binarise it again")
    if num_bytes % kind.itemsize:
        raise contradiction
    tokens = _map(path, kind)
    all_lengths = _map(index, np.dtype("<i4"), _HEADER.size, num_sentences)
    all_pointers = _map(index, np.dtype("<i8"), _HEADER.size + num_sentences * 4, num_sentences)
    end = 0  # of what was read so far, in tokens
    for first in range(0, num_sentences, _BLOCK):
        rows = slice(first, first + _BLOCK)
        lengths = np.array(all_lengths[rows])
        starts = find_starts(lengths) + end
        if (lengths < 1).any() or (all_pointers[rows] != starts * kind.itemsize).any():
            raise ValueError(
                f"{index} has sentences that are empty or not stored one after the other: binarise it again"
            )
        begin, end = end, int(starts[-1] + lengths[-1])
        if end > len(tokens):
            raise contradiction
        block = tokens[begin:end]
        wrong = np.flatnonzero((block < 0) | (block >= vocabulary_size))
        if len(wrong):
            sentence = first + int(np.searchsorted(starts, begin + wrong[0], side="right"))
            raise ValueError(
                f"{path} has the id {block[wrong[0]]} in sentence {sentence:,}, expected ids below the dictionary's "
                f"{vocabulary_size:,}: binarise it with the dictionaries beside it"
            )
        wrong = np.flatnonzero(tokens[starts + lengths - 1] != END)
        if len(wrong):
            sentence = first + int(wrong[0]) + 1
            raise ValueError(f"{path} does not end sentence {sentence:,} with id {END}: fairseq-preprocess appends it")
        yield Sentences(tokens, starts, lengths)
    if end != len(tokens):
        raise contradiction


def _map(path: Path, kind: np.dtype[Any], offset: int = 0, length: int | None = None) -> NDArray[Any]:
    if length == 0 or path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, kind)
    return np.asarray(np.memmap(path, kind, "r", offset, None if length is None else (length,)))


def _read_header(path: Path) -> tuple[np.dtype[Any], int]:
    """Return the type of the ids and the number of sentences; check them against the size of the index."""
    with path.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if not header.startswith(_MAGIC):
        raise ValueError(f"{path} is not an index in fairseq's mmap format: binarise with --dataset-impl mmap")
    num_bytes = path.stat().st_size
    if len(header) == _HEADER.size:
        _, version, code, num_sentences = _HEADER.unpack(header)
        if version == 1 and code in _INTEGERS and num_bytes == _HEADER.size + num_sentences * _ENTRY_BYTES:
            return np.dtype(_INTEGERS[code]), num_sentences
    raise ValueError(f"{path} has {num_bytes:,} bytes, which its header contradicts: binarise it again")
