"""Which split a pair of sentences belongs to: decided by its English line, for every language and every source.

A catalogue is translated into a hundred languages, so a model that saw an English line in one of them would know it in
all. The rule needs no list, so that a source that is added at run time follows it too.
"""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256

SPLITS = ("train", "valid", "test")
_SALT = "gpipe multilingual corpus 1"
# Of 1,000 English lines about 100 are for testing, which with 102 languages makes several thousand pairs.
_VALID_FROM, _TEST_FROM = 0.8, 0.9


def clean_line(text: str) -> str:
    """Return the text as one line: every run of white space becomes one space, and none is left at the ends."""
    return " ".join(text.split())


@lru_cache(maxsize=100_000)  # the English lines come once in every language
def split_of(english: str) -> str:
    """Return the split, one of SPLITS, of all pairs with this English line.

    Case and punctuation do not matter: "Log in" and "Log in:" would otherwise give each other away.
    """
    letters = "".join(character for character in english.casefold() if character.isalnum())
    digest = sha256(f"{_SALT}\n{letters or clean_line(english)}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    return "train" if share < _VALID_FROM else "valid" if share < _TEST_FROM else "test"


def check_split(split: str) -> None:
    """Raise ValueError for anything but train, valid and test."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")


def base_language(tag: str) -> str:
    """Return the language of a locale or BCP 47 tag: "pt" of "pt_BR", "sr" of "sr-Latn", "ca" of "ca@valencia"."""
    for mark in "@-":
        tag = tag.replace(mark, "_")
    return tag.partition("_")[0].lower()


def choose_variants(tags: Iterable[str]) -> dict[str, list[str]]:
    """Return, for each base language, the tags that stand for it: the plain one, or else all of its variants, sorted.

    English in all its variants is left out: it is what is translated to.
    """
    tags = sorted(set(tags))
    variants: dict[str, list[str]] = {}
    for tag in tags:
        language = base_language(tag)
        if language not in {"en", "und"}:  # "und" is BCP 47's undetermined
            variants.setdefault(language, []).append(tag)
    return {language: [language] if language in found else found for language, found in sorted(variants.items())}
