"""Token ids on disk, mapped into memory: text is tokenised once, and a corpus of any size takes little memory.

    <folder>/.lock                                    locked by the process that writes; the others wait
    <folder>/train.de-en.<digest>/description.json    its sources and counts
                                  sources.tokens      the ids, sentence after sentence
                                  sources.starts      int64, where each sentence starts
                                  sources.lengths     int32, the tokens of each sentence, END included
                                  targets. ...        the same

The digest covers everything that the ids depend on: the text files' names, sizes and modification times, the tokenizer,
the length limit, and the version of this format. Text that changes is therefore tokenised again. A folder appears
only when it is complete. You may delete a folder at any time if no run uses it.
"""

import json
import mmap
import os
import resource
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from gpipe.data.text.parallel_corpus import LanguagePairs, Skipped
from gpipe.data.text.sentences import Sentences, choose_token_type
from gpipe.durable_files import flush, locked, write_flushed

DEFAULT_NAME = "token_cache"
_FORMAT = 2
_DESCRIPTION = "description.json"
_SIDES = ("sources", "targets")
_START, _LENGTH = np.dtype("<i8"), np.dtype("<i4")
_PIECE = 1 << 10  # the fewest pairs to prefetch at a time

Key = Mapping[str, Any]


class _Description(BaseModel):
    """The contents of a folder's description.json; validated, because the file may be damaged."""

    model_config = ConfigDict(strict=True)

    key: dict[str, Any]
    num_pairs: NonNegativeInt
    num_tokens: NonNegativeInt
    longest: NonNegativeInt
    sources_bytes: NonNegativeInt
    targets_bytes: NonNegativeInt
    skipped: dict[str, tuple[int, str]]


def _read_description(folder: Path) -> _Description:
    try:
        return _Description.model_validate_json((folder / _DESCRIPTION).read_bytes())
    except OSError as error:
        raise _explain_damage(folder, f"its {_DESCRIPTION} cannot be read: {error}") from error
    except ValidationError as error:
        cause = error.errors()[0]
        field = "".join(f"{part}: " for part in cause["loc"][:1])
        raise _explain_damage(folder, f"its {_DESCRIPTION} is invalid: {field}{cause['msg']}") from error


@dataclass(frozen=True)
class CachedSentences(Sentences):
    """Sentences of a cache; values from its files are checked, and an error names the damaged folder."""

    folder: Path
    max_tokens: int
    vocabulary_size: int

    def get_lengths(self, rows: NDArray[np.int64] | slice) -> NDArray[np.int32]:
        """Return the lengths of some of the sentences."""
        lengths = np.asarray(super().get_lengths(rows))
        if len(lengths) and (lengths.min() < 1 or lengths.max() > self.max_tokens):
            raise _explain_damage(self.folder, "it has a sentence that is empty or too long")
        return lengths

    def pad(self, rows: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """Return some of the sentences, int64 [len(rows), width], padded on the right."""
        try:
            batch = super().pad(rows, width)
        except IndexError:
            raise _explain_damage(self.folder, "it has a sentence outside of its tokens") from None
        if batch.size and (batch.min() < 0 or batch.max() >= self.vocabulary_size):
            raise _explain_damage(self.folder, f"it has an id that is not below {self.vocabulary_size:,}")
        return batch


class _MappedFile:
    """A file of numbers mapped into memory: the system reads the parts in use and may drop them again.

    Raises:
        ValueError: the file has another size than `num_bytes`; None expects none.
    """

    def __init__(self, path: Path, kind: np.dtype[Any], num_bytes: int | None = None) -> None:
        found = path.stat().st_size if path.is_file() else None
        if num_bytes is not None and found != num_bytes:
            raise _explain_damage(path.parent, f"{path.name} has {found} bytes, expected {num_bytes}")
        self.numbers, self._map = np.empty(0, kind), None
        if found:  # an empty file cannot be mapped
            _allow_open_files()
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.numbers = np.frombuffer(self._map, kind)

    def prefetch(self, first: int, end: int) -> None:
        """Start reading the numbers first .. end - 1 from the disk, as far as they exist."""
        size = self.numbers.itemsize
        begin, stop = max(0, first) * size // mmap.PAGESIZE * mmap.PAGESIZE, min(end, len(self.numbers)) * size
        if self._map is not None and begin < stop:
            self._map.madvise(mmap.MADV_WILLNEED, begin, stop - begin)


def _allow_open_files() -> None:
    """Let this process have as many files open as the system allows.

    Before Python 3.13 a mapped file stays open: 102 languages have 1,224, and many systems begin with a limit of 1,024.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS names a limit that it does not accept
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class CachedPairs(LanguagePairs):
    """The pairs of one language in a cache.

    Args:
        folder: the language's folder.
        key: everything that the ids depend on.
        tokens: the file and the type of each side's ids, if the ids are not in the cache.

    Raises:
        ValueError: the cache is damaged.
    """

    def __init__(self, folder: Path, key: Key, tokens: Sequence[tuple[Path, np.dtype[Any]]] | None) -> None:
        found = _read_description(folder)
        if found.key != json.loads(json.dumps(key)):
            raise _explain_damage(folder, "it was made from other files or settings")
        num, longest = found.num_pairs, found.longest
        if longest > key["max_tokens"] or not num <= found.num_tokens <= num * longest:
            raise _explain_damage(folder, f"its {_DESCRIPTION} contradicts itself")
        kind, sizes = choose_token_type(key["vocabulary_size"]), (found.sources_bytes, found.targets_bytes)
        self._files = [
            (
                _MappedFile(*tokens[side]) if tokens else _MappedFile(folder / f"{name}.tokens", kind, sizes[side]),
                _MappedFile(folder / f"{name}.starts", _START, num * _START.itemsize),
                _MappedFile(folder / f"{name}.lengths", _LENGTH, num * _LENGTH.itemsize),
            )
            for side, name in enumerate(_SIDES)
        ]
        limits = folder, int(key["max_tokens"]), int(key["vocabulary_size"])
        sources, targets = (
            CachedSentences(ids.numbers, starts.numbers, lengths.numbers, *limits)
            for ids, starts, lengths in self._files
        )
        super().__init__(sources, targets, Skipped(found.skipped))
        self.num_tokens, self.longest = found.num_tokens, longest

    def prefetch(self, rows: NDArray[np.int64]) -> None:
        """Start reading these pairs from the disk, in as few pieces as possible."""
        pieces = np.unique(rows // _PIECE)
        runs = np.split(pieces, np.flatnonzero(np.diff(pieces) > 1) + 1) if len(pieces) else []
        ends = [(int(run[0]) * _PIECE, min(len(self), (int(run[-1]) + 1) * _PIECE)) for run in runs]
        for _, starts, lengths in self._files:
            for first, end in ends:
                starts.prefetch(first, end)
                lengths.prefetch(first, end)
        for tokens, starts, lengths in self._files:
            for first, end in ends:
                last = int(starts.numbers[end - 1]) + int(lengths.numbers[end - 1])
                tokens.prefetch(int(starts.numbers[first]), last)


def open_cached(
    cache: Path,
    name: str,
    files: Sequence[Path],
    settings: Mapping[str, Any],
    blocks: Iterable[LanguagePairs],
    tokens: Sequence[tuple[Path, np.dtype[Any]]] | None = None,
) -> CachedPairs:
    """Return the pairs of a language; read and write them, unless they are in the cache.

    Args:
        cache: the folder of all languages; processes of one or several hosts may share it.
        name: such as train.de-en.
        files: the files that the pairs come from.
        settings: what else the pairs depend on, including vocabulary_size and max_tokens.
        blocks: reads the pairs block by block when it is iterated over. If `tokens` is None, the array of each side of
            a block must hold its sentences in order and nothing else.
        tokens: as in `CachedPairs`.

    Raises:
        ValueError: the cache is damaged, its folder cannot be written, or the pairs cannot be read.
    """
    key = {"format": _FORMAT, "files": _describe(files), **settings}
    folder = cache / f"{name}.{sha256(json.dumps(key).encode()).hexdigest()[:16]}"
    try:
        if not folder.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with locked(cache / ".lock"):
                if not folder.exists():  # no other process has just written it
                    _write(folder, key, files, blocks, keep_tokens=tokens is None)
    except OSError as error:
        raise ValueError(
            f"the token cache {cache} cannot be written ({error}): free space there, or set data.cache to a folder "
            "with free space that you may write to"
        ) from error
    return CachedPairs(folder, key, tokens)


def _write(
    folder: Path, key: Key, files: Sequence[Path], blocks: Iterable[LanguagePairs], *, keep_tokens: bool
) -> None:
    cache, name = folder.parent, folder.name
    for left in cache.glob(".*.partial"):  # a killed process left it: a live one would hold the lock
        shutil.rmtree(left)
    partial = cache / f".{name}.partial"
    partial.mkdir()
    print(f"reading {name.rpartition('.')[0]} into {cache}, once", file=sys.stderr, flush=True)
    try:
        description = {"key": key, **_write_pairs(partial, blocks, keep_tokens=keep_tokens)}
        if _describe(files) != key["files"]:
            raise ValueError(f"{files[0]} changed while it was read: start again when it is complete")
        write_flushed(partial / _DESCRIPTION, json.dumps(description, indent=1) + "\n")
        partial.rename(folder)
        flush(cache)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_pairs(folder: Path, blocks: Iterable[LanguagePairs], *, keep_tokens: bool) -> dict[str, Any]:
    """Write pairs block by block, and flush them to the disk; return what describes them."""
    skipped = Skipped()
    counts = dict.fromkeys(("num_pairs", "num_tokens", "longest", *(f"{side}_bytes" for side in _SIDES)), 0)
    kinds = ("tokens", "starts", "lengths") if keep_tokens else ("starts", "lengths")
    with ExitStack() as stack:
        files = {
            (side, kind): stack.enter_context((folder / f"{side}.{kind}").open("wb"))
            for side in _SIDES
            for kind in kinds
        }
        for pairs in blocks:
            skipped.merge(pairs.skipped)
            counts["num_pairs"] += len(pairs)
            counts["num_tokens"] += pairs.num_tokens
            counts["longest"] = max(counts["longest"], pairs.longest)
            for side, sentences in zip(_SIDES, (pairs.sources, pairs.targets), strict=True):
                starts = sentences.starts
                if keep_tokens:
                    starts = starts + counts[f"{side}_bytes"] // sentences.tokens.itemsize
                    counts[f"{side}_bytes"] += files[side, "tokens"].write(sentences.tokens.data)
                files[side, "starts"].write(np.ascontiguousarray(starts, _START).data)
                files[side, "lengths"].write(np.ascontiguousarray(sentences.lengths, _LENGTH).data)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    return {**counts, "skipped": skipped}


def _describe(files: Sequence[Path]) -> list[list[Any]]:
    return [[path.name, stat.st_size, stat.st_mtime_ns] for path, stat in ((path, path.stat()) for path in files)]


def _explain_damage(folder: Path, why: str) -> ValueError:
    return ValueError(
        f"the token cache {folder} is damaged ({why}): delete that folder, and the next run creates it again"
    )
