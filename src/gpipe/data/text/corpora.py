"""The corpora of pairs of sentences by name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpipe.data.images.source import Place
from gpipe.data.text.binarized import binarized_languages, read_dictionary
from gpipe.data.text.cached_languages import add_up, open_binarized, open_text
from gpipe.data.text.english_split import SPLITS, check_split
from gpipe.data.text.multilingual_text import (
    VLC_CATALOGUES,
    embedded_languages,
    embedded_pairs,
    embedded_tokenizer_path,
    vlc_pairs,
)
from gpipe.data.text.parallel_corpus import Pairs, ParallelCorpus, Skipped, some_of
from gpipe.data.text.parallel_text import text_languages, text_pairs
from gpipe.data.text.text_pairs import Encoder, TextPair
from gpipe.data.text.token_cache import DEFAULT_NAME, CachedPairs, TokenCache
from gpipe.data.text.tokenizer import Tokenizer

_ALTERNATIVE = "data=multilingual_embedded uses 66,197 pairs of 102 languages that come with this package."


@dataclass(frozen=True, kw_only=True)
class CorpusSource(Place):
    """Describe one corpus: which languages a folder has, how they are read, and where it lies.

    languages: root -> codes, sorted. pairs: (root, split, language) -> lines; None for what is binarised. is_cached:
    whether it may have any size, so that a token cache holds it; else it is kept in memory.
    """

    languages: Callable[[Path], Sequence[str]]
    pairs: Callable[[Path, str, str], Iterator[TextPair]] | None
    is_cached: bool = False
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
        is_cached=True,
        required=tuple(f"{split}.*-en.en" for split in SPLITS),
        tree="""\
  <data.root>/train.<language>-en.<language>
  <data.root>/train.<language>-en.en           and the same for valid and test""",
        how_to_get="write the sentences of each language and of English into two files, one a line, in UTF-8.",
    ),
    "binarized": CorpusSource(
        languages=binarized_languages,
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
    cache: str | Path | None = None,
) -> ParallelCorpus:
    """Open one split, "train", "valid" or "test", of a named corpus.

    root: the folder that holds it; None means its usual place. tokenizer: what `open_tokenizer` gives. languages: those
    to read; None is all. max_tokens: longer sentences are left out, counted with END. max_pairs: the most pairs of a
    language, in the train split only. cache: the folder for the ids of what is not kept in memory, which the first
    process to open it fills while the others wait; None is token_cache in the root. Raises DataMissing, FairseqMissing,
    and ValueError for an unknown name, split or language, for a language of which nothing is left, for damaged files,
    and for a cache that cannot be written.
    """
    check_split(split)
    source = _source(name)
    folder = source.find_root(name, root)
    chosen = _choose(name, source.languages(folder), languages)
    if max_pairs is not None and max_pairs < 1:
        raise ValueError(f"max_pairs {max_pairs} must be at least 1, or None for all")
    if cache is not None and not source.is_cached:
        raise ValueError(
            f"data.cache is {cache}, but the corpus {name} is small and kept in memory: leave data.cache=null"
        )
    token_cache = TokenCache(Path(cache).expanduser() if cache is not None else folder / DEFAULT_NAME)
    cached: dict[str, CachedPairs] = {}
    pairs: Mapping[str, Pairs] = cached
    if source.pairs is None:
        size = _count_symbols(folder, chosen, tokenizer)
        cached |= {each: open_binarized(token_cache, folder, split, each, size, max_tokens) for each in chosen}
        skipped = add_up(cached.values())
    elif tokenizer is None:
        raise ValueError(f"the corpus {name} is text: give the tokenizer that open_tokenizer({name!r}, None) returns")
    elif source.is_cached:
        size = tokenizer.vocabulary_size
        cached |= {each: open_text(token_cache, folder, split, each, tokenizer, max_tokens) for each in chosen}
        skipped = add_up(cached.values())
    else:
        size, encoder = tokenizer.vocabulary_size, Encoder(tokenizer, max_tokens)
        pairs = {each: encoder.encode(source.pairs(folder, split, each)) for each in chosen}
        skipped = [encoder.empty, encoder.long]
    for language, found in pairs.items():
        if not len(found):
            raise ValueError(
                f"nothing is left of the language {language} in the split {split} of the corpus {name}"
                f"{_reasons(skipped)}: leave it out of data.languages, or give it data"
            )
    return ParallelCorpus(pairs, size, skipped, max_pairs if split == "train" else None)


def _count_symbols(root: Path, languages: Sequence[str], tokenizer: Tokenizer | None) -> int:
    """Return the size of a binarised corpus's vocabulary, which a tokenizer must have too, if there is one."""
    symbols = read_dictionary(root, languages)
    if tokenizer is not None and tokenizer.pieces()[4:] != symbols[4 : tokenizer.vocabulary_size]:
        raise ValueError(
            f"the tokenizer {tokenizer.path} has other pieces than {root / 'dict.en.txt'}: binarise with the "
            "dictionary that its write_dictionary makes, or choose the tokenizer that the text was cut with"
        )
    return len(symbols)


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
