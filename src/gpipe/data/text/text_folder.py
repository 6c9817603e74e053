"""Plain text as sequences of tokens: every .txt file of a folder, cut into pieces of equal length."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from hashlib import sha256
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpipe.data.images.class_folders import walk
from gpipe.data.images.image_set import is_hidden
from gpipe.data.location import DataMissing, Location, check_known, find_training_folder, refuse_two_sources
from gpipe.data.text.parallel_text import read_lines
from gpipe.data.text.tokenizer import END, Tokenizer
from gpipe.durable_files import locked, replacing

CACHE = ".token_cache"
_FORMAT = 2  # of the cached tokens; raise it when the same text becomes other tokens
_FOLDERS = {"train": "train", "test": "val"}
_LINES = 10_000  # to encode at once
_LOCATION = Location(
    noun="text",
    tree="""\
  <data.root>/train/<name>.txt    UTF-8, any folders in between
  <data.root>/val/<name>.txt
or, with data.validation_share=0.1,
  <data.root>/<name>.txt""",
    how_to_get="put your text there, and set data.root.",
    alternative="data=random_tokens, to measure speed.",
)


class TextSequences:
    """Sequences of a text, ids [n]: sequence i has the tokens from i x sequence_length on, and one more."""

    def __init__(self, tokens: NDArray[np.int32], sequence_length: int) -> None:
        self._tokens, self._length = tokens, sequence_length

    def __len__(self) -> int:
        """Return the number of whole sequences."""
        return max(0, len(self._tokens) - 1) // self._length

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Return sequence `index`, [length + 1]."""
        start = index * self._length
        return self._tokens[start : start + self._length + 1].astype(np.int64)


def check_text_folder(root: str | Path | None, share: float | None) -> Path:
    """Return the folder of plain text.

    Args:
        root: has train/ and val/ with .txt files at any depth; or, with a share, train/ or such files.
        share: the share of the text for evaluation, from the end of each file; None if root/val has texts.

    Raises:
        DataMissing: there are no such files.
        ValueError: there is a share, but root/val has texts too.
    """
    if not root:
        raise DataMissing(_LOCATION.explain("text_folder", "the folder data.root, which is not set"))
    folder = Path(root).expanduser()
    if (folder / "val").is_dir():
        refuse_two_sources(share, folder / "val", "has texts")
    for place in (find_training_folder(folder),) if share is not None else (folder / "train", folder / "val"):
        if next(_files(place), None) is None:
            raise DataMissing(_LOCATION.explain("text_folder", f"files that end with .txt in {place}"))
    return folder


def _files(folder: Path) -> Iterator[Path]:
    """Yield the text files at any depth, except hidden ones, such as copies that editors make."""
    for place, names in walk(folder, ".", {}) if folder.is_dir() else ():
        paths = (folder / place / name for name in names if not is_hidden(name))
        yield from (path for path in paths if path.suffix.lower() == ".txt" and path.is_file())


def open_text_folder(
    root: str | Path | None, split: str, tokenizer: Tokenizer, sequence_length: int, share: float | None
) -> TextSequences:
    """Open one split of a folder of text.

    Each line becomes tokens, followed by END. The tokens of all files are concatenated in the order of the paths. They
    are cached in root/.token_cache, for later runs and for the other processes of this one.

    Args:
        root: as in `check_text_folder`.
        split: "train" or "test".
        tokenizer: cuts the lines.
        sequence_length: the number of tokens that a model reads.
        share: as in `check_text_folder`.

    Raises:
        DataMissing, ValueError: as for `check_text_folder`; or a file is not UTF-8, or the text is too short.
    """
    folder = check_text_folder(root, share)
    check_known("split", split, _FOLDERS)
    paths = sorted(_files(find_training_folder(folder) if share is not None else folder / _FOLDERS[split]))
    tokens = _read_cached(folder, paths, tokenizer, share, split)
    found = TextSequences(tokens, sequence_length)
    if len(found) == 0:
        change = "" if share is None else f"{'raise' if split == 'test' else 'lower'} data.validation_share={share:g}, "
        raise ValueError(
            f"the {split} text in {folder} has {len(tokens)} tokens, expected at least data.sequence_length + 1 = "
            f"{sequence_length + 1}: add text, {change}or lower data.sequence_length."
        )
    return found


def _read_cached(
    folder: Path, paths: list[Path], tokenizer: Tokenizer, share: float | None, split: str
) -> NDArray[np.int32]:
    """Return the tokens of files, from the cache if it was made from the same files with the same tokenizer."""
    stats = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    key = sha256(repr((_FORMAT, split, share, tokenizer.sha256, stats)).encode()).hexdigest()
    cached = folder / CACHE / f"{key[:32]}.npy"
    with ExitStack() as stack:
        is_locked = False  # in a folder without write access, or without locks, every start reads the text
        with suppress(OSError):
            cached.parent.mkdir(exist_ok=True)
            stack.enter_context(locked(cached.parent / ".lock"))
            is_locked = True
        with suppress(OSError, ValueError, EOFError):  # missing or damaged
            kept: NDArray[np.int32] = np.load(cached, mmap_mode="r", allow_pickle=False)
            return kept
        files = (_encode(path, tokenizer) for path in paths)
        tokens = np.concatenate(list(files if share is None else _take_split(files, share, split)))
        if is_locked:
            with suppress(OSError), replacing(cached) as partial, partial.open("wb") as stream:
                np.save(stream, tokens, allow_pickle=False)
    return tokens


def _encode(path: Path, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Return the tokens of a file's lines, which end as those of any system do."""
    parts = [np.empty(0, np.int32)]
    lines = (part for line in read_lines(path) for part in line.rstrip("\r\n").split("\r"))
    while some := list(islice(lines, _LINES)):
        encoded = filter(None, tokenizer.encode_lines(some))
        parts.append(np.array([number for line in encoded for number in (*line, END)], np.int32))
    return np.concatenate(parts)


def _take_split(files: Iterable[NDArray[np.int32]], share: float, split: str) -> Iterator[NDArray[np.int32]]:
    """Yield the part of each file that belongs to a split; the end is for evaluation.

    Rounding the share in each of many short files could give 0, so the running total is rounded instead.
    """
    total = 0
    for tokens in files:
        border = len(tokens) - (round(share * (total + len(tokens))) - round(share * total))
        total += len(tokens)
        yield tokens[border:] if split == "test" else tokens[:border]
