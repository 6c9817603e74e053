"""The corpora of pairs of sentences by name."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpipe.data.binarized import binarized_languages, binarized_pairs, read_dictionary
from gpipe.data.english_split import SPLITS, check_split
from gpipe.data.multilingual_text import (
    VLC_CATALOGUES,
    embedded_languages,
    embedded_pairs,
    embedded_tokenizer_path,
    vlc_pairs,
)
from gpipe.data.parallel_corpus import LanguagePairs, ParallelCorpus, Skipped, some_of
from gpipe.data.parallel_text import text_languages, text_pairs
from gpipe.data.source import Place
from gpipe.data.text_pairs import Encoder, TextPair, long_pairs
from gpipe.data.tokenizer import Tokenizer

_ALTERNATIVE = "data=multilingual_embedded uses 66,197 pairs of 102 languages that come with this package."


@dataclass(frozen=True, kw_only=True)
class CorpusSource(Place):
    """Describe one corpus: which languages a folder has, how they are read, and where it lies.

    languages: root -> codes, sorted. pairs: (root, split, language) -> lines; None for what is binarised.
    """

    languages: Callable[[Path], Sequence[str]]
    pairs: Callable[[Path, str, str], Iterator[TextPair]] | None
    noun: str = "corpus"
    alternative: str = _ALTERNATIVE


CORPORA: dict[str, CorpusSource] = {
    "multilingual_embedded": CorpusSource(languages=embedded_languages, pairs=embedded_pairs),
    "multilingual_vlc": CorpusSource(
        languages=embedded_languages,
        pairs=vlc_pairs,
        required=(VLC_CATALOGUES,),
        tree="  <data.root>/usr/share/locale/<locale>/LC_MESSAGES/vlc.mo",
        how_to_get=(
            "on Debian or Ubuntu `apt-get install vlc-l10n`; without root `apt-get download vlc-l10n`, "
            "`dpkg-deb -x vlc-l10n_*.deb vlc-l10n` and data.root=vlc-l10n."
        ),
        default_root=Path("/"),
    ),
    "parallel_text": CorpusSource(
        languages=text_languages,
        pairs=text_pairs,
        required=tuple(f"{split}.*-en.en" for split in SPLITS),
        tree="""\
  <data.root>/train.<language>-en.<language>
  <data.root>/train.<language>-en.en           and the same for valid and test""",
        how_to_get="write the sentences of each language and of English into two files, one a line, in UTF-8.",
    ),
    "binarized": CorpusSource(
        languages=binarized_languages,
        pairs=None,
        required=("dict.*.txt", *(f"{split}.*-en.en.idx" for split in SPLITS)),
        tree="""\
  <data.root>/dict.<language>.txt
  <data.root>/dict.en.txt
  <data.root>/train.<language>-en.<language>.bin and .idx
  <data.root>/train.<language>-en.en.bin and .idx         and the same for valid and test""",
        how_to_get=(
            "`fairseq-preprocess --source-lang <language> --target-lang en --joined-dictionary --trainpref ... "
            "--validpref ... --testpref ... --destdir <data.root>`; several languages need the same --srcdict and "
            "--tgtdict."
        ),
    ),
}


def check_corpus(name: str, root: str | Path | None = None) -> Path:
    """Find the folder of a corpus, reading nothing. Raises DataMissing, and ValueError for an unknown name."""
    return _source(name).find_root(name, root)


def open_tokenizer(name: str, path: str | Path | None) -> Tokenizer | None:
    """Return the tokenizer of a path, or without one that of the corpus: None for a binarised one, which has none.

    Raises ValueError for a file that is no tokenizer of ours, and for an unknown name.
    """
    if path is not None:
        return Tokenizer(path)
    return None if _source(name).pairs is None else Tokenizer(embedded_tokenizer_path())


def open_corpus(
    name: str,
    split: str,
    root: str | Path | None = None,
    *,
    tokenizer: Tokenizer | None,
    languages: Sequence[str] | None,
    max_tokens: int,
    max_pairs: int | None = None,
) -> ParallelCorpus:
    """Open one split, "train", "valid" or "test", of a named corpus.

    root: the folder that holds it; None means its usual place. tokenizer: what `open_tokenizer` gives. languages: those
    to read; None is all. max_tokens: longer sentences are left out, counted with END. max_pairs: the most pairs of a
    language, in the train split only. Raises DataMissing, FairseqMissing, and ValueError for an unknown name, split or
    language, for a language of which nothing is left, and for damaged files.
    """
    check_split(split)
    source = _source(name)
    folder = source.find_root(name, root)
    chosen = _choose(name, source.languages(folder), languages)
    if max_pairs is not None and max_pairs < 1:
        raise ValueError(f"max_pairs {max_pairs} must be at least 1, or None for all")
    if source.pairs is None:
        pairs, size, skipped = _map_binarized(folder, split, chosen, tokenizer, max_tokens)
    else:
        if tokenizer is None:
            raise ValueError(
                f"the corpus {name} is text: give the tokenizer that open_tokenizer({name!r}, None) returns"
            )
        encoder = Encoder(tokenizer, max_tokens)
        pairs = {language: encoder.encode(source.pairs(folder, split, language)) for language in chosen}
        size, skipped = tokenizer.vocabulary_size, [encoder.empty, encoder.long]
    for language, found in pairs.items():
        if not len(found):
            raise ValueError(
                f"nothing is left of the language {language} in the split {split} of the corpus {name}"
                f"{_reasons(skipped)}: leave it out of data.languages, or give it data"
            )
    return ParallelCorpus(pairs, size, skipped, max_pairs if split == "train" else None)


def _map_binarized(
    root: Path, split: str, languages: Sequence[str], tokenizer: Tokenizer | None, max_tokens: int
) -> tuple[dict[str, LanguagePairs], int, list[Skipped]]:
    symbols = read_dictionary(root, languages)
    if tokenizer is not None and tokenizer.pieces()[4:] != symbols[4 : tokenizer.vocabulary_size]:
        raise ValueError(
            f"the tokenizer {tokenizer.path} has other pieces than {root / 'dict.en.txt'}: binarise with the "
            "dictionary that its write_dictionary makes, or choose the tokenizer that the text was cut with"
        )
    long = long_pairs(max_tokens)
    pairs = {}
    for language in languages:
        found = binarized_pairs(root, split, language, len(symbols))
        kept = np.flatnonzero(found.longest() <= max_tokens)
        if len(kept) < len(found):
            first = int(np.flatnonzero(found.longest() > max_tokens)[0]) + 1
            long.add(len(found) - len(kept), f"{root / f'{split}.{language}-en'}:{first}")
            found = found.select(kept)
        pairs[language] = found
    return pairs, len(symbols), [long]


def _choose(name: str, known: Sequence[str], languages: Sequence[str] | None) -> list[str]:
    if languages is None:
        return list(known)
    if not languages:
        raise ValueError(f"data.languages is empty: name some of {some_of(known)}, or null for all")
    for language in languages:
        if language not in known:
            raise ValueError(
                f"data.languages has {language!r}, of which the corpus {name} has nothing: choose among "
                f"{some_of(known)}"
            )
    return sorted(set(languages))


def _reasons(skipped: Sequence[Skipped]) -> str:
    reasons = [f"{each.number:,} pairs {each.reason} were skipped" for each in skipped if each.number]
    return f" ({', '.join(reasons)})" if reasons else ""


def _source(name: str) -> CorpusSource:
    if name not in CORPORA:
        raise ValueError(f"unknown corpus {name!r}: choose one of {', '.join(CORPORA)}")
    return CORPORA[name]
