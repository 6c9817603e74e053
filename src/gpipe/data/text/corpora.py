"""The corpora of sentence pairs, one row per name: how to read a corpus, and what its files look like."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpipe.data.location import Location, check_known
from gpipe.data.text.binarized import open_binarized, read_dictionary
from gpipe.data.text.multilingual_text import (
    SPLITS,
    VLC_CATALOGUES,
    find_embedded_tokenizer,
    list_embedded_languages,
    read_embedded_pairs,
    read_vlc_pairs,
)
from gpipe.data.text.parallel_corpus import LanguagePairs, ParallelCorpus
from gpipe.data.text.parallel_text import (
    TextEncoder,
    TextPair,
    describe_long,
    list_languages,
    open_text,
    read_text_pairs,
)
from gpipe.data.text.token_cache import DEFAULT_NAME
from gpipe.data.text.tokenizer import Tokenizer

_ALTERNATIVE = "data=multilingual_embedded uses 66,197 pairs of 102 languages that come with this package."


@dataclass(frozen=True, kw_only=True)
class CorpusSource(Location):
    """A row of the table of corpora.

    Attributes:
        languages: root -> sorted codes.
        pairs: (root, split, language) -> lines; None for binarised text.
        is_cached: True keeps the ids in a token cache, so the corpus may have any size; False keeps them in memory.
    """

    languages: Callable[[Path], Sequence[str]]
    pairs: Callable[[Path, str, str], Iterator[TextPair]] | None
    is_cached: bool = False
    noun: str = "corpus"
    alternative: str = _ALTERNATIVE


CORPORA: dict[str, CorpusSource] = {
    "multilingual_embedded": CorpusSource(languages=list_embedded_languages, pairs=read_embedded_pairs),
    "multilingual_vlc": CorpusSource(
        languages=list_embedded_languages,
        pairs=read_vlc_pairs,
        required=(VLC_CATALOGUES,),
        how_to_get=(
            "on Debian or Ubuntu `apt-get install vlc-l10n`; without root `apt-get download vlc-l10n`, "
            "`dpkg-deb -x vlc-l10n_*.deb vlc-l10n` and data.root=vlc-l10n."
        ),
        default_root=Path("/"),
    ),
    "parallel_text": CorpusSource(
        languages=list_languages,
        pairs=read_text_pairs,
        is_cached=True,
        required=tuple(f"{split}.*-en.en" for split in SPLITS),
        tree="""\
  <data.root>/train.<language>-en.<language>
  <data.root>/train.<language>-en.en           and the same for valid and test""",
        how_to_get="write the sentences of each language and of English into two files, one per line, in UTF-8.",
    ),
    "binarized": CorpusSource(
        languages=partial(list_languages, ending=".idx"),
        pairs=None,
        is_cached=True,
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


def check_corpus(name: str, root: str | Path | None = None, languages: Sequence[str] | None = None) -> Path:
    """Find the folder of a corpus; read no data.

    Raises:
        DataMissing: the corpus is missing.
        ValueError: the name or a language is unknown.
    """
    source = _find_row(name)
    folder = source.find_root(name, root)
    if languages is not None:
        _choose(name, source.languages(folder), languages)
    return folder


def open_tokenizer(name: str, path: str | Path | None) -> Tokenizer | None:
    """Return the tokenizer at a path or, without a path, the corpus's own; a binarised corpus has none.

    Raises:
        ValueError: the file is not a SentencePiece model with our special ids, or the name is unknown.
    """
    if path is not None:
        return Tokenizer(path)
    return None if _find_row(name).pairs is None else Tokenizer(find_embedded_tokenizer())


def open_text_tokenizer(path: str | Path | None) -> Tokenizer:
    """Return the tokenizer at a path or, without a path, the embedded one; errors are Tokenizer's."""
    return Tokenizer(path if path is not None else find_embedded_tokenizer())


def open_corpus(
    name: str,
    split: str,
    root: str | Path | None = None,
    *,
    tokenizer: Tokenizer | None,
    languages: Sequence[str] | None,
    max_tokens: int,
    max_pairs: int | None = None,
    cache: str | Path | None = None,
) -> ParallelCorpus:
    """Open one split of a named corpus.

    Args:
        name: one of CORPORA.
        split: "train", "valid" or "test".
        root: the folder that holds the corpus; None means its usual place.
        tokenizer: what `open_tokenizer` returns.
        languages: the languages to read, at least one; None means all.
        max_tokens: leave out longer sentences; END counts.
        max_pairs: the most pairs per language, in the train split only.
        cache: the folder for the ids of a corpus that is not kept in memory; None means token_cache in the root. The
            first process to open it fills it; the others wait.

    Raises:
        DataMissing: the corpus is missing.
        FairseqMissing: the corpus is binarised, and fairseq is not installed.
        ValueError: a name, split or language is unknown, no language is named, a language has no pairs left, a file is
            missing or damaged (the message names it, and the line), or the cache cannot be written.
    """
    check_known("split", split, SPLITS)
    if max_pairs is not None and max_pairs < 1:
        raise ValueError(f"max_pairs is {max_pairs}, expected at least 1, or None for all")
    source, folder = _find_row(name), check_corpus(name, root)
    chosen = _choose(name, source.languages(folder), languages)
    if cache is not None and not source.is_cached:
        raise ValueError(
            f"data.cache is {cache}, but the corpus {name} is small and kept in memory: leave data.cache=null"
        )
    token_cache = Path(cache).expanduser() if cache is not None else folder / DEFAULT_NAME
    pairs: dict[str, LanguagePairs] = {}
    if source.pairs is None:
        size = _count_symbols(folder, chosen, tokenizer)
        pairs |= {each: open_binarized(token_cache, folder, split, each, size, max_tokens) for each in chosen}
    else:
        assert tokenizer is not None, "a corpus of text needs its tokenizer"
        size, encoder = tokenizer.vocabulary_size, TextEncoder(tokenizer, max_tokens)
        for each in chosen:
            if source.is_cached:
                pairs[each] = open_text(token_cache, folder, split, each, tokenizer, max_tokens)
            else:
                pairs[each] = encoder.encode(list(source.pairs(folder, split, each)))
    for language, found in pairs.items():
        if not len(found):
            reasons = [f"{number:,} pairs {reason} were skipped" for reason, (number, _) in found.skipped.items()]
            listed = f" ({', '.join(reasons)})" if reasons else ""
            remedy = "raise data.max_tokens, or" if describe_long(max_tokens) in found.skipped else "or"
            raise ValueError(
                f"nothing is left of the language {language} in the split {split} of the corpus {name}{listed}: leave "
                f"it out of data.languages, {remedy} give it data"
            )
    return ParallelCorpus(pairs, size, max_pairs if split == "train" else None)


def _count_symbols(root: Path, languages: Sequence[str], tokenizer: Tokenizer | None) -> int:
    """Return the size of a binarised corpus's vocabulary; refuse a tokenizer with another vocabulary."""
    symbols = read_dictionary(root, languages)
    if tokenizer is not None and tokenizer.pieces()[4:] != symbols[4:]:
        raise ValueError(
            f"the tokenizer {tokenizer.path} has other pieces than {root / 'dict.en.txt'}: binarise with the "
            "dictionary that its write_dictionary makes, or set data.tokenizer to the one that cut the text"
        )
    return len(symbols)


def _choose(name: str, known: Sequence[str], languages: Sequence[str] | None) -> list[str]:
    if languages is None:
        return list(known)
    if not languages:
        raise ValueError("data.languages is empty, expected codes of languages, or null for all of the corpus's")
    for language in languages:
        if language not in known:
            some = ", ".join(known) if len(known) <= 8 else f"{', '.join(known[:8])}, ... ({len(known)} in all)"
            quote = "write 'no' in quotes, which YAML reads as false, or " if language == "False" else ""
            raise ValueError(
                f"data.languages has {language!r}, which the corpus {name} does not have: {quote}choose among {some}"
            )
    return sorted(set(languages))


def _find_row(name: str) -> CorpusSource:
    check_known("corpus", name, CORPORA)
    return CORPORA[name]
