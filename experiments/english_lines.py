"""Count the English lines that the languages of the embedded corpus share.

    python -m experiments.english_lines

Finds the languages whose English lines are the same in every split. Lists, by language and as numbers, which English
lines models are validated and tested on, without the sentences that training skips as too long. Seconds.
"""

from pathlib import Path
from typing import Any

from experiments.program import StudyProgram
from gpipe.config import compose_plain
from gpipe.data import SPLITS, open_corpus, open_tokenizer
from gpipe.data.text.multilingual_text import list_embedded_languages, read_embedded_pairs
from reproductions.english_lines import ENGLISH_LINES

CLAIMS = ("figure3_multilingual", "table5_batch_size")
DATA = "multilingual_embedded"


def find_same() -> list[dict[str, Any]]:
    """Return each group of several languages with the same English lines, and how many lines these are by split."""
    groups: dict[tuple[frozenset[str], ...], list[str]] = {}
    for language in list_embedded_languages(Path()):
        pairs = (read_embedded_pairs(Path(), split, language) for split in SPLITS)
        groups.setdefault(tuple(frozenset(pair.target for pair in some) for some in pairs), []).append(language)
    return [
        {"languages": languages, "num_lines": dict(zip(SPLITS, map(len, lines), strict=True))}
        for lines, languages in groups.items()
        if len(languages) > 1
    ]


def list_lines(split: str, max_tokens: int) -> dict[str, list[int]]:
    """Return the number of the English line of each pair that a model reads, by language."""
    tokenizer = open_tokenizer(DATA, None)
    corpus = open_corpus(DATA, split, tokenizer=tokenizer, languages=None, max_tokens=max_tokens)
    numbers: dict[bytes, int] = {}
    return {
        language: [
            numbers.setdefault(corpus.pair(language, place)[1].tobytes(), len(numbers))
            for place in range(len(corpus.pairs(language)))
        ]
        for language in corpus.languages
    }


if __name__ == "__main__":
    program = StudyProgram(__doc__, dict.fromkeys(CLAIMS, ENGLISH_LINES.tables))
    program.parse()
    data = compose_plain(["+experiment=deep_or_wide_laptop"])["data"]
    results = {"same": find_same(), "lines": {split: list_lines(split, data["max_tokens"]) for split in SPLITS[1:]}}
    program.publish_record(ENGLISH_LINES.make_record({"data": data}, results))
