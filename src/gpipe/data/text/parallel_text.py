"""Plain parallel text: two files per language, the same sentence in the same line of both."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from gpipe.data.text.text_pairs import TextPair

TARGET_LANGUAGE = "en"
_LONGEST_LINE = 1 << 20  # bytes; a longer one is no sentence, and a file without line ends would fill the memory


def text_languages(root: Path) -> Sequence[str]:
    """Return the languages that have training files in the folder, sorted."""
    end = f"-{TARGET_LANGUAGE}.{TARGET_LANGUAGE}"
    return sorted(path.name.removeprefix("train.").removesuffix(end) for path in root.glob(f"train.*{end}"))


def text_files(root: Path, split: str, language: str) -> list[Path]:
    """Return the files of a language, its own and the English one. Raises ValueError for a missing one."""
    stem = f"{split}.{language}-{TARGET_LANGUAGE}"
    paths = [root / f"{stem}.{side}" for side in (language, TARGET_LANGUAGE)]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} does not exist: a language of parallel text needs it in every split")
    return paths


def text_pairs(root: Path, split: str, language: str) -> Iterator[TextPair]:
    """Yield the pairs of <split>.<language>-en.<language> and .en, line by line.

    Raises ValueError for a missing file, files of unequal length, a line of more than 1 MiB, and what is not UTF-8,
    with file and line.
    """
    paths = text_files(root, split, language)
    counts = [0, 0]
    for source, target in zip_longest(*map(_lines, paths)):
        counts = [count + (line is not None) for count, line in zip(counts, (source, target), strict=True)]
        if source is not None and target is not None:
            yield TextPair(source, target, str(paths[0]), counts[0])
    if counts[0] != counts[1]:
        raise ValueError(
            f"{paths[0]} has {counts[0]:,} lines, but {paths[1]} has {counts[1]:,}: line by line they must say the same"
        )


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(_LONGEST_LINE + 1), b""), start=1):
            if len(line) > _LONGEST_LINE:
                raise ValueError(f"{path}:{number} is longer than 1 MiB: write one sentence per line")
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}:{number} is not UTF-8 (byte {error.start + 1} of the line is {line[error.start]:#04x}): "
                    "convert the file to UTF-8"
                ) from error
