"""What goes into a token cache: a language of plain text as ids, or where the ids of a binarised one lie."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gpipe.data.text.binarized import binarized_blocks, binarized_files, number_type
from gpipe.data.text.parallel_corpus import Skipped
from gpipe.data.text.parallel_text import text_files, text_pairs
from gpipe.data.text.text_pairs import Encoder, long_pairs
from gpipe.data.text.token_cache import CachedPairs, PairsWriter, TokenCache
from gpipe.data.text.tokenizer import Tokenizer


def open_text(
    cache: TokenCache, root: Path, split: str, language: str, tokenizer: Tokenizer, max_tokens: int
) -> CachedPairs:
    """Return a language of plain text; its first opening tokenises it, some thousand lines at a time."""

    def fill(writer: PairsWriter) -> Sequence[Skipped]:
        encoder = Encoder(tokenizer, max_tokens)
        for block in encoder.encode_blocks(text_pairs(root, split, language)):
            writer.add(block)
        return encoder.empty, encoder.long

    settings = {
        "vocabulary_size": tokenizer.vocabulary_size,
        "max_tokens": max_tokens,
        "tokenizer_sha256": tokenizer.sha256,
    }
    return cache.open(f"{split}.{language}-en", text_files(root, split, language), settings, fill)


def open_binarized(
    cache: TokenCache, root: Path, split: str, language: str, vocabulary_size: int, max_tokens: int
) -> CachedPairs:
    """Return a binarised language, whose ids stay in its .bin files; its first opening checks every one of them."""

    def fill(writer: PairsWriter) -> Sequence[Skipped]:
        long = long_pairs(max_tokens)
        num_read = 0
        for block in binarized_blocks(root, split, language, vocabulary_size):
            fits = np.maximum(block.sources.lengths, block.targets.lengths) <= max_tokens
            if not fits.all():
                first = num_read + int(np.argmin(fits)) + 1
                long.add(int(np.count_nonzero(~fits)), f"{root / f'{split}.{language}-en'}:{first}")
            writer.add(block.select(np.flatnonzero(fits)))
            num_read += len(block)
        return [long]

    *bins, source_index, target_index = files = binarized_files(root, split, language)
    settings = {"vocabulary_size": vocabulary_size, "max_tokens": max_tokens, "tokenizer_sha256": None}
    tokens = [(path, number_type(index)) for path, index in zip(bins, (source_index, target_index), strict=True)]
    return cache.open(f"{split}.{language}-en", files, settings, fill, tokens)


def add_up(languages: Iterable[CachedPairs]) -> list[Skipped]:
    """Return what was left out of all languages, for each reason; the first of the first language comes first."""
    found: dict[str, Skipped] = {}
    for language in languages:
        for each in language.skipped:
            found.setdefault(each.reason, replace(each, number=0)).add(each.number, each.first)
    return list(found.values())
