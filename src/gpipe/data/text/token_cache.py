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
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from gpipe.data.text.parallel_corpus import LanguagePairs, Skipped
from gpipe.data.text.sentences import Sentences, choose_token_type
from gpipe.durable_files import flush, locked, write_flushed

DEFAULT_NAME = "token_cache"
_FORMAT = 1
_DESCRIPTION = "description.json"
_SIDES = ("sources", "targets")
_START, _LENGTH = np.dtype("<i8"), np.dtype("<i4")
_NUMBERS = ("num_pairs", "num_tokens", "longest")
_MAX_DESCRIPTION_BYTES = 1 << 16
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
    skipped: list[tuple[str, int, str]]

    @classmethod
    def read(cls, folder: Path) -> "_Description":
        """Read and validate the description of a folder."""
        try:
            with (folder / _DESCRIPTION).open("rb") as file:
                content = file.read(_MAX_DESCRIPTION_BYTES + 1)
            if len(content) > _MAX_DESCRIPTION_BYTES:
                raise ValueError("it is too long")
            return cls.model_validate_json(content)
        except ValidationError as error:
            cause = error.errors()[0]
            field = "".join(f"{part}: " for part in cause["loc"][:1])
            raise _explain_damage(folder, f"its {_DESCRIPTION} is invalid: {field}{cause['msg']}") from error
        except (OSError, ValueError) as error:
            raise _explain_damage(folder, f"its {_DESCRIPTION} cannot be read: {error}") from error


@dataclass(frozen=True)
class CachedSentences(Sentences):
    """Sentences of a cache; values from its files are checked, and an error names the damaged folder."""

    folder: Path
    max_tokens: int
    vocabulary_size: int
    is_in_memory: ClassVar[bool] = False

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return the ids of one sentence, int64 [length], END included."""
        rows = np.array([range(len(self))[index]])
        (sentence,) = self.pad(rows, int(self.get_lengths(rows)[0]))
        return np.asarray(sentence)

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
    """A file of numbers mapped into memory: the system reads the parts in use and may drop them again."""

    def __init__(self, path: Path, kind: np.dtype[Any]) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.numbers = np.frombuffer(self._map, kind)

    def prefetch(self, first: int, end: int) -> None:
        """Start reading the numbers first .. end - 1 from the disk, as far as they exist."""
        size = self.numbers.itemsize
        begin, stop = max(0, first) * size // mmap.PAGESIZE * mmap.PAGESIZE, min(end, len(self.numbers)) * size
        if begin < stop:
            self._map.madvise(mmap.MADV_WILLNEED, begin, stop - begin)


class CachedPairs(LanguagePairs):
    """The pairs of one language in a cache; its files are mapped when a sentence is first read.

    Args:
        folder: the language's folder.
        key: everything that the ids depend on.
        tokens: the file and the type of each side's ids, if the ids are not in the cache.

    Raises:
        ValueError: the cache is damaged.
    """

    def __init__(self, folder: Path, key: Key, tokens: Sequence[tuple[Path, np.dtype[Any]]] | None) -> None:
        self._folder, self._key = folder, key
        description = _Description.read(folder)
        if description.key != json.loads(json.dumps(key)):
            raise _explain_damage(folder, "it was made from other files or settings")
        self._num_pairs, self.num_tokens = description.num_pairs, description.num_tokens
        self.longest = description.longest
        if self.longest > key["max_tokens"] or not len(self) <= self.num_tokens <= len(self) * self.longest:
            raise _explain_damage(folder, f"its {_DESCRIPTION} contradicts itself")
        self.skipped = [Skipped(*row) for row in description.skipped]
        kind = choose_token_type(key["vocabulary_size"])
        self._tokens = tokens or [(folder / f"{side}.tokens", kind) for side in _SIDES]
        for side in _SIDES:
            self._check_size(f"{side}.starts", self._num_pairs * _START.itemsize)
            self._check_size(f"{side}.lengths", self._num_pairs * _LENGTH.itemsize)
            if tokens is None:
                self._check_size(f"{side}.tokens", getattr(description, f"{side}_bytes"))

    def __len__(self) -> int:
        """Return the number of pairs."""
        return self._num_pairs

    @property
    def is_in_memory(self) -> bool:
        """False, without mapping the files."""
        return False

    @cached_property
    def sources(self) -> Sentences:
        """The sentences of the language."""
        return self._sentences(0)

    @cached_property
    def targets(self) -> Sentences:
        """The same sentences in the target language."""
        return self._sentences(1)

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

    @cached_property
    def _files(self) -> list[tuple[_MappedFile, _MappedFile, _MappedFile]]:
        """The tokens, starts and lengths of each side."""
        return [
            (
                _MappedFile(*tokens),
                _MappedFile(self._folder / f"{side}.starts", _START),
                _MappedFile(self._folder / f"{side}.lengths", _LENGTH),
            )
            for side, tokens in zip(_SIDES, self._tokens, strict=True)
        ]

    def _sentences(self, side: int) -> CachedSentences:
        tokens, starts, lengths = (file.numbers for file in self._files[side])
        return CachedSentences(
            tokens, starts, lengths, self._folder, self._key["max_tokens"], self._key["vocabulary_size"]
        )

    def _check_size(self, name: str, expected: Any) -> None:
        path = self._folder / name
        found = path.stat().st_size if path.is_file() else None
        if found is None or found != expected:
            raise _explain_damage(self._folder, f"{name} has {found} bytes, expected {expected}")


class PairsWriter:
    """Writes the pairs of one language into a folder, block by block.

    Args:
        folder: the language's folder.
        files: closes the files.
        keep_tokens: copy the ids too. False if `starts` refer to other files of ids.
    """

    def __init__(self, folder: Path, files: ExitStack, *, keep_tokens: bool) -> None:
        kinds = ("tokens", "starts", "lengths")
        self._files = {
            (side, kind): files.enter_context((folder / f"{side}.{kind}").open("wb"))
            for side in _SIDES
            for kind in kinds
            if keep_tokens or kind != "tokens"
        }
        self._keep_tokens = keep_tokens
        self._places = dict.fromkeys(_SIDES, 0)
        self._bytes = dict.fromkeys(_SIDES, 0)
        self._counts = dict.fromkeys(_NUMBERS, 0)

    def add(self, pairs: LanguagePairs) -> None:
        """Append pairs. With keep_tokens, the array of each side must hold its sentences in order and nothing else."""
        self._counts["num_pairs"] += len(pairs)
        self._counts["num_tokens"] += pairs.num_tokens
        self._counts["longest"] = max(self._counts["longest"], pairs.longest)
        for side, sentences in zip(_SIDES, (pairs.sources, pairs.targets), strict=True):
            starts = sentences.starts
            if self._keep_tokens:
                starts = starts + self._places[side]
                self._places[side] += len(sentences.tokens)
                self._bytes[side] += sentences.tokens.nbytes
                self._files[side, "tokens"].write(sentences.tokens.data)
            self._files[side, "starts"].write(np.ascontiguousarray(starts, _START).data)
            self._files[side, "lengths"].write(np.ascontiguousarray(sentences.lengths, _LENGTH).data)

    def finish(self) -> dict[str, Any]:
        """Flush all files to the disk; return the counts of what was written."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return self._counts | {f"{side}_bytes": number for side, number in self._bytes.items()}


Fill = Callable[[PairsWriter], Sequence[Skipped]]


@dataclass(frozen=True)
class TokenCache:
    """A folder of cached languages; processes of one or several hosts may share it."""

    folder: Path

    def open(
        self,
        name: str,
        files: Sequence[Path],
        settings: Mapping[str, Any],
        fill: Fill,
        tokens: Sequence[tuple[Path, np.dtype[Any]]] | None = None,
    ) -> CachedPairs:
        """Return the pairs of a language; `fill` writes them, unless they are in the cache.

        Args:
            name: such as train.de-en.
            files: the files that the pairs come from.
            settings: what else the pairs depend on, including vocabulary_size and max_tokens.
            fill: writes the pairs, and returns what it left out.
            tokens: as in `CachedPairs`.

        Raises:
            ValueError: the cache is damaged, its folder cannot be written, or `fill` failed.
        """
        key = {"format": _FORMAT, "files": _describe(files), **settings}
        folder = self.folder / f"{name}.{sha256(json.dumps(key).encode()).hexdigest()[:16]}"
        if not folder.exists():
            try:
                self._build(folder, key, files, fill, keep_tokens=tokens is None)
            except OSError as error:
                raise ValueError(
                    f"the token cache {self.folder} cannot be written ({error}): free space there, or set data.cache "
                    "to a folder with free space that you may write to"
                ) from error
        return CachedPairs(folder, key, tokens)

    def _build(self, folder: Path, key: Key, files: Sequence[Path], fill: Fill, *, keep_tokens: bool) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / ".lock"):
            if folder.exists():  # another process has just written it
                return
            for left in self.folder.glob(".*.partial"):  # a killed process left it: a live one would hold the lock
                shutil.rmtree(left)
            partial = self.folder / f".{folder.name}.partial"
            partial.mkdir()
            print(f"reading {folder.name.rpartition('.')[0]} into {self.folder}, once", file=sys.stderr, flush=True)
            try:
                with ExitStack() as stack:
                    writer = PairsWriter(partial, stack, keep_tokens=keep_tokens)
                    skipped = [[each.reason, each.number, each.first] for each in fill(writer) if each.number]
                    description = {"key": key, "skipped": skipped, **writer.finish()}
                if _describe(files) != key["files"]:
                    raise ValueError(f"{files[0]} changed while it was read: start again when it is complete")
                write_flushed(partial / _DESCRIPTION, json.dumps(description, indent=1) + "\n")
                partial.rename(folder)
                flush(self.folder)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise


def _describe(files: Sequence[Path]) -> list[list[Any]]:
    return [[path.name, stat.st_size, stat.st_mtime_ns] for path, stat in ((path, path.stat()) for path in files)]


def _explain_damage(folder: Path, why: str) -> ValueError:
    return ValueError(
        f"the token cache {folder} is damaged ({why}): delete that folder, and the next run creates it again"
    )
