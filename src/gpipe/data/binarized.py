"""Folders made by fairseq-preprocess, through fairseq's own Dictionary and MMapIndexedDataset."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpipe._fairseq import VERSION, import_fairseq
from gpipe.data.parallel_corpus import LanguagePairs
from gpipe.data.sentences import Sentences, starts_of
from gpipe.data.special_tokens import BEGIN, END, PADDING, UNKNOWN

TARGET_LANGUAGE = "en"
_MAGIC = b"MMIDIDX\x00\x00"  # of the index of fairseq's mmap format
_HEADER = struct.Struct("<9sQBQ")  # magic, version, kind of number, number of sentences
_INTEGERS = (1, 2, 3, 4, 5, 8, 9, 10)  # of the kinds of number, those that an id may be
_ENTRY_BYTES = 4 + 8  # a sentence's length, and where it starts
_BLOCK = 1 << 24  # tokens that are checked at a time


def binarized_languages(root: Path) -> Sequence[str]:
    """Return the languages that have training data in the folder, sorted."""
    end = f"-{TARGET_LANGUAGE}.{TARGET_LANGUAGE}.idx"
    return sorted(path.name.removeprefix("train.").removesuffix(end) for path in root.glob(f"train.*{end}"))


def read_dictionary(root: Path, languages: Sequence[str]) -> list[str]:
    """Return the symbols of the vocabulary that all languages and English share, in the order of their ids.

    Raises ValueError where a dictionary is missing or differs from the English one, FairseqMissing without fairseq.
    """
    joined: list[str] | None = None
    for language in (TARGET_LANGUAGE, *languages):
        path = root / f"dict.{language}.txt"
        if not path.is_file():
            raise ValueError(f"{path} does not exist: fairseq-preprocess writes it beside the binarised text")
        reader: Any = import_fairseq("fairseq.data").Dictionary
        try:
            dictionary = reader.load(str(path))
        except Exception as error:  # it raises ValueError, RuntimeError and plain Exception
            raise ValueError(f"{path} is no dictionary of fairseq ({error}): binarise again") from error
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


def binarized_pairs(root: Path, split: str, language: str, vocabulary_size: int) -> LanguagePairs:
    """Map the pairs <split>.<language>-en into memory; only their lengths are read, and every id is checked once.

    Raises ValueError for missing or damaged files, sides of unequal length, and an id outside the vocabulary.
    """
    stem = f"{split}.{language}-{TARGET_LANGUAGE}"
    sources, targets = (_map(root / f"{stem}.{side}", vocabulary_size) for side in (language, TARGET_LANGUAGE))
    if len(sources) != len(targets):
        raise ValueError(
            f"{root / stem} has {len(sources):,} sentences in {language} and {len(targets):,} in {TARGET_LANGUAGE}: "
            "binarise it again"
        )
    return LanguagePairs(sources, targets)


def _map(prefix: Path, vocabulary_size: int) -> Sentences:
    for ending in ("idx", "bin"):
        if not Path(f"{prefix}.{ending}").is_file():
            raise ValueError(f"{prefix}.{ending} does not exist: binarise it again, with --dataset-impl mmap")
    _check_index(Path(f"{prefix}.idx"))
    dataset: Any = import_fairseq("fairseq.data.indexed_dataset").MMapIndexedDataset(str(prefix))
    kind = np.dtype(dataset._index.dtype)
    lengths = np.array(dataset.sizes, np.int32)
    num_bytes = Path(f"{prefix}.bin").stat().st_size
    if int(lengths.sum(dtype=np.int64)) * kind.itemsize != num_bytes:
        raise ValueError(f"{prefix}.bin has {num_bytes:,} bytes, which its index contradicts: binarise it again")
    starts = dataset._index._pointers // kind.itemsize
    if (lengths < 1).any() or (starts != starts_of(lengths)).any():
        raise ValueError(f"{prefix}.idx has sentences that are empty or not one behind the other: binarise it again")
    # The data set closes the file when it is collected, so it stays with what is read from it.
    sentences = Sentences(np.frombuffer(dataset._bin_buffer, kind), starts, lengths, owner=dataset)
    _check_ids(prefix, sentences, vocabulary_size)
    return sentences


def _check_index(path: Path) -> None:
    """Refuse an index that fairseq would stumble over. Raises ValueError."""
    with path.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if not header.startswith(_MAGIC):
        raise ValueError(f"{path} is no index of fairseq's mmap format: binarise with --dataset-impl mmap")
    num_bytes = path.stat().st_size
    if len(header) == _HEADER.size:
        _, version, kind, num_sentences = _HEADER.unpack(header)
        if version == 1 and kind in _INTEGERS and num_bytes == _HEADER.size + num_sentences * _ENTRY_BYTES:
            return
    raise ValueError(f"{path} has {num_bytes:,} bytes, which its header contradicts: binarise it again")


def _check_ids(prefix: Path, sentences: Sentences, vocabulary_size: int) -> None:
    tokens = sentences.tokens
    for start in range(0, len(tokens), _BLOCK):
        block = tokens[start : start + _BLOCK]
        if block.min() < 0 or block.max() >= vocabulary_size:
            place = start + int(np.flatnonzero((block < 0) | (block >= vocabulary_size))[0])
            sentence = int(np.searchsorted(sentences.starts, place, side="right"))
            raise ValueError(
                f"{prefix}.bin has the id {tokens[place]} in sentence {sentence:,}, expected ids below the "
                f"dictionary's {vocabulary_size:,}: binarise it with the dictionaries beside it"
            )
    ends = tokens[sentences.starts + sentences.lengths - 1]
    if len(ends) and (ends != END).any():
        sentence = int(np.flatnonzero(ends != END)[0]) + 1
        raise ValueError(
            f"{prefix}.bin does not end sentence {sentence:,} with id {END}: fairseq-preprocess appends it"
        )
