"""The corpora of 102 languages: the one that comes with the package, and the same with VLC's catalogues."""

import lzma
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from gpipe.data.text.english_split import choose_variants, split_of
from gpipe.data.text.message_catalogue import read_mo
from gpipe.data.text.text_pairs import TextPair

TARGET_LANGUAGE = "en"
VLC_CATALOGUES = "usr/share/locale/*/LC_MESSAGES/vlc.mo"
_EMBEDDED = "multilingual_corpus.tsv.xz"


def embedded_tokenizer_path() -> Path:
    """Return the SentencePiece model of 4,000 pieces that was trained on the embedded corpus's train split."""
    return Path(str(files("gpipe.data").joinpath("embedded", "multilingual_tokenizer.model")))


@cache  # a run opens two splits, and unpacking takes a tenth of a second
def read_embedded() -> dict[str, list[TextPair]]:
    """Return all pairs of the embedded corpus, language -> pairs; its README describes the format."""
    english: list[str] = []
    pairs: dict[str, list[TextPair]] = {}
    packed = files("gpipe.data").joinpath("embedded", _EMBEDDED).read_bytes()
    for line, row in enumerate(lzma.decompress(packed).decode().splitlines(), start=1):
        language, number, text = row.split("\t")
        if language == TARGET_LANGUAGE:
            english.append(text)
        else:
            pairs.setdefault(language, []).append(TextPair(text, english[int(number)], _EMBEDDED, line))
    return pairs


def embedded_languages(_root: Path) -> Sequence[str]:
    """Return the 102 languages of both corpora, sorted."""
    return tuple(read_embedded())


def embedded_pairs(_root: Path, split: str, language: str) -> Iterator[TextPair]:
    """Yield the pairs of one split and language that come with the package."""
    return (pair for pair in read_embedded()[language] if split_of(pair.target) == split)


def vlc_pairs(root: Path, split: str, language: str) -> Iterator[TextPair]:
    """Yield the embedded pairs, and then those of VLC's catalogues below root that are not among them.

    English lines are split by the same rule, so that none of an evaluation is trained on.
    Raises ValueError, which names the file, for a damaged catalogue, PermissionError for one that cannot be reached.
    """
    yield from embedded_pairs(root, split, language)
    seen = {(pair.source, pair.target) for pair in read_embedded()[language]}
    # Not by glob, which leaves out a folder that cannot be read.
    folder, _, catalogue = VLC_CATALOGUES.partition("/*/")
    paths = {tag.name: path for tag in (root / folder).iterdir() if (path := tag / catalogue).exists()}
    for tag in choose_variants(paths).get(language, []):
        for entry, (text, english) in enumerate(read_mo(paths[tag]), start=1):
            if (text, english) not in seen and split_of(english) == split:
                seen.add((text, english))
                yield TextPair(text, english, str(paths[tag]), entry)
