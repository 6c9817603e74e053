"""The corpora of 102 languages: the embedded one, the same with VLC's catalogues, and the rule that splits both.

The English line alone decides the split of a pair, for every language and source. A catalogue is translated into a
hundred languages, so a model that has seen an English line in one of them would know it in all. The rule needs no list,
so it also covers sources that are added at run time.
"""

import lzma
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from gpipe.data.text.message_catalogue import read_mo
from gpipe.data.text.parallel_corpus import TARGET_LANGUAGE
from gpipe.data.text.parallel_text import TextPair
from gpipe.data.text.tokenizer import clean_line

SPLITS = ("train", "valid", "test")
VLC_CATALOGUES = "usr/share/locale/*/LC_MESSAGES/vlc.mo"
_EMBEDDED = "multilingual_corpus.tsv.xz"
_SALT = "gpipe multilingual corpus 1"
# About 100 of 1,000 English lines are for testing: several thousand pairs in 102 languages.
_VALID_FROM, _TEST_FROM = 0.8, 0.9


@lru_cache(maxsize=100_000)  # every language has the same English lines
def split_of(english: str) -> str:
    """Return the split, one of SPLITS, of all pairs with this English line.

    Case and punctuation do not matter: "Log in" in one split would give away "Log in:" in another.
    """
    letters = "".join(character for character in english.casefold() if character.isalnum())
    digest = sha256(f"{_SALT}\n{letters or clean_line(english)}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    return "train" if share < _VALID_FROM else "valid" if share < _TEST_FROM else "test"


def find_base_language(tag: str) -> str:
    """Return the language of a locale or BCP 47 tag: "pt" of "pt_BR", "sr" of "sr-Latn", "ca" of "ca@valencia"."""
    for mark in "@-":
        tag = tag.replace(mark, "_")
    return tag.partition("_")[0].lower()


def choose_variants(tags: Iterable[str]) -> dict[str, list[str]]:
    """Return base language -> the tags to use for it: the plain tag or, without one, all variants, sorted.

    English and its variants are left out: English is the target language.
    """
    tags = sorted(set(tags))
    variants: dict[str, list[str]] = {}
    for tag in tags:
        language = find_base_language(tag)
        if language not in {"en", "und"}:  # "und" is BCP 47's undetermined
            variants.setdefault(language, []).append(tag)
    return {language: [language] if language in found else found for language, found in sorted(variants.items())}


def find_embedded_tokenizer() -> Path:
    """Return the SentencePiece model of 4,000 pieces, trained on the embedded corpus's train split."""
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


def list_embedded_languages(_root: Path) -> Sequence[str]:
    """Return the 102 languages of both corpora, sorted."""
    return tuple(read_embedded())


def read_embedded_pairs(_root: Path, split: str, language: str) -> Iterator[TextPair]:
    """Yield the embedded pairs of one split and language."""
    return (pair for pair in read_embedded()[language] if split_of(pair.target) == split)


def read_vlc_pairs(root: Path, split: str, language: str) -> Iterator[TextPair]:
    """Yield the embedded pairs, then the new ones of VLC's catalogues below root; errors are `read_mo`'s."""
    yield from read_embedded_pairs(root, split, language)
    seen = {(pair.source, pair.target) for pair in read_embedded()[language]}
    # glob would silently skip a folder that cannot be read.
    folder, _, catalogue = VLC_CATALOGUES.partition("/*/")
    paths = {tag.name: path for tag in (root / folder).iterdir() if (path := tag / catalogue).exists()}
    for tag in choose_variants(paths).get(language, []):
        for entry, (text, english) in enumerate(read_mo(paths[tag]), start=1):
            if (text, english) not in seen and split_of(english) == split:
                seen.add((text, english))
                yield TextPair(text, english, str(paths[tag]), entry)
