"""Plain parallel text, two files per language with one sentence per line, and its encoding as token ids."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from gpipe.data.text.parallel_corpus import TARGET_LANGUAGE, LanguagePairs, Skipped
from gpipe.data.text.sentences import Sentences
from gpipe.data.text.token_cache import CachedPairs, open_cached
from gpipe.data.text.tokenizer import Tokenizer

_FILES = ("",), "each language of parallel text needs this file in every split"  # what `find_files` takes
_LONGEST_LINE = 1 << 20  # bytes: a file without line breaks would fill the memory
# The most pairs and characters to hold as text at a time.
_BLOCK = 50_000
_BLOCK_CHARACTERS = 1 << 24


class TextPair(NamedTuple):
    """A sentence, the same in the target language, and where it is: `file` and `line`, counted from 1."""

    source: str
    target: str
    file: str
    line: int


def list_languages(root: Path, ending: str = "") -> Sequence[str]:
    """Return the languages that have training files in the folder, sorted; `ending` follows the names of text files."""
    end = f"-{TARGET_LANGUAGE}.{TARGET_LANGUAGE}{ending}"
    return sorted(path.name.removeprefix("train.").removesuffix(end) for path in root.glob(f"train.*{end}"))


def find_files(root: Path, split: str, language: str, endings: Sequence[str], remedy: str) -> list[Path]:
    """Return, for each ending, the file of a language and the English one; `remedy` says what to do without it."""
    stem = f"{split}.{language}-{TARGET_LANGUAGE}"
    paths = [root / f"{stem}.{side}{ending}" for ending in endings for side in (language, TARGET_LANGUAGE)]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} does not exist: {remedy}")
    return paths


def read_text_pairs(root: Path, split: str, language: str) -> Iterator[TextPair]:
    """Yield the pairs of <split>.<language>-en.<language> and .en, line by line."""
    paths = find_files(root, split, language, *_FILES)
    counts = [0, 0]
    for source, target in zip_longest(*(read_lines(path, _LONGEST_LINE) for path in paths)):
        counts = [count + (line is not None) for count, line in zip(counts, (source, target), strict=True)]
        if source is not None and target is not None:
            yield TextPair(source, target, str(paths[0]), counts[0])
    if counts[0] != counts[1]:
        raise ValueError(
            f"{paths[0]} has {counts[0]:,} lines, but {paths[1]} has {counts[1]:,}: lines with "
            "the same number must be translations of each other"
        )


def read_lines(path: Path, longest: int | None = None) -> Iterator[str]:
    """Yield the lines of a file in UTF-8; refuse one of more than `longest` bytes, if there is a limit."""
    limit = -1 if longest is None else longest + 1
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(iter(lambda: stream.readline(limit), b""), start=1):
                if len(line) == limit:
                    raise ValueError(f"{path}:{number} is longer than 1 MiB: write one sentence per line")
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        place = f"byte {error.start + 1} of the line is {line[error.start]:#04x}"
        raise ValueError(f"{path}:{number} is not UTF-8 ({place}): convert the file to UTF-8") from error
    except OSError as error:  # the token cache would take it for its own
        raise ValueError(f"{path} cannot be read ({error.strerror}): make it readable, or copy it again") from error


def open_text(cache: Path, root: Path, split: str, language: str, tokenizer: Tokenizer, max_tokens: int) -> CachedPairs:
    """Open a language of plain text; tokenise it the first time, block by block."""
    blocks = map(TextEncoder(tokenizer, max_tokens).encode, _cut_blocks(read_text_pairs(root, split, language)))
    settings = {
        "vocabulary_size": tokenizer.vocabulary_size,
        "max_tokens": max_tokens,
        "tokenizer_sha256": tokenizer.sha256,
    }
    return open_cached(cache, f"{split}.{language}-en", find_files(root, split, language, *_FILES), settings, blocks)


class TextEncoder:
    """Encodes lines as token ids; leaves out and counts pairs that have an empty side, or over max_tokens with END."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._targets: dict[str, list[int]] = {}

    def encode(self, block: Sequence[TextPair]) -> LanguagePairs:
        """Return pairs of one language as ids."""
        skipped = Skipped()
        sources = self._tokenizer.encode_lines([pair.source for pair in block])
        targets = self._encode_targets([pair.target for pair in block])
        kept: tuple[list[list[int]], list[list[int]]] = [], []
        for pair, source, target in zip(block, sources, targets, strict=True):
            is_long = max(len(source), len(target)) >= self._max_tokens  # END adds one
            if source and target and not is_long:
                kept[0].append(source)
                kept[1].append(target)
            else:
                reason = describe_long(self._max_tokens) if source and target else "with an empty line"
                skipped.add(reason, 1, f"{pair.file}:{pair.line}")
        packed, english = (Sentences.pack(side, self._tokenizer.vocabulary_size) for side in kept)
        return LanguagePairs(packed, english, skipped)

    def _encode_targets(self, lines: list[str]) -> list[list[int]]:
        """Encode English lines, and cache some, because a corpus of many languages repeats them."""
        if len(self._targets) > _BLOCK:
            self._targets.clear()
        new = [line for line in dict.fromkeys(lines) if line not in self._targets]
        self._targets.update(zip(new, self._tokenizer.encode_lines(new), strict=True))
        return [self._targets[line] for line in lines]


def describe_long(max_tokens: int) -> str:
    """Return the reason why pairs that are too long are left out."""
    return f"longer than {max_tokens} tokens (data.max_tokens)"


def _cut_blocks(pairs: Iterable[TextPair]) -> Iterator[list[TextPair]]:
    block: list[TextPair] = []
    num_characters = 0
    for pair in pairs:
        block.append(pair)
        num_characters += len(pair.source) + len(pair.target)
        if len(block) == _BLOCK or num_characters >= _BLOCK_CHARACTERS:
            yield block
            block, num_characters = [], 0
    if block:
        yield block
