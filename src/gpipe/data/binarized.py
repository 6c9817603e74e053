"""Folders made by fairseq-preprocess, through fairseq's own Dictionary and MMapIndexedDataset."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpipe._fairseq import VERSION, import_fairseq
from gpipe.data.parallel_corpus import LanguagePairs
from gpipe.data.sentences import Sentences
from gpipe.data.special_tokens import BEGIN, END, PADDING, UNKNOWN

TARGET_LANGUAGE = "en"
_MAGIC = b"MMIDIDX\x00\x00"  # of the index of fairseq's mmap format
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
        dictionary: Any = import_fairseq("fairseq.data").Dictionary.load(str(path))
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
    with Path(f"{prefix}.idx").open("rb") as stream:
        mapped = stream.read(len(_MAGIC)) == _MAGIC
    if not mapped:
        raise ValueError(f"{prefix}.idx is no index of fairseq's mmap format: binarise with --dataset-impl mmap")
    dataset: Any = import_fairseq("fairseq.data.indexed_dataset").MMapIndexedDataset(str(prefix))
    kind = np.dtype(dataset._index.dtype)
    lengths = np.array(dataset.sizes, np.int32)
    num_bytes = Path(f"{prefix}.bin").stat().st_size
    if int(lengths.sum(dtype=np.int64)) * kind.itemsize != num_bytes:
        raise ValueError(f"{prefix}.bin has {num_bytes:,} bytes, which its index contradicts: binarise it again")
    starts = dataset._index._pointers // kind.itemsize
    # The data set closes the file when it is collected, so it stays with what is read from it.
    sentences = Sentences(np.frombuffer(dataset._bin_buffer, kind), starts, lengths, owner=dataset)
    _check_ids(prefix, sentences, vocabulary_size)
    return sentences


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
