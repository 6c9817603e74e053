"""Train a SentencePiece vocabulary on your own parallel text, for all of its languages and English.

    python train_tokenizer.py <folder> --vocabulary-size 64000

Reads the training files of data=parallel_text in the folder, train.<language>-en.<language> and .en, and writes
tokenizer.model beside them, where the translation experiments look for it. It reads only the first lines of each file
(`--max-lines`): a language with a thousand times as much text would leave no pieces for the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from gpipe.config.checks import require
from gpipe.data import CORPORA, Tokenizer
from gpipe.launch.errors import report_errors


def lines(folder: Path, max_lines: int) -> Iterator[str]:
    """Yield both sides of the first training pairs of each language."""
    source = CORPORA["parallel_text"]
    assert source.pairs is not None
    for language in source.languages(folder):
        for pair in islice(source.pairs(folder, "train", language), max_lines):
            yield pair.source
            yield pair.target


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, write and describe the vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="has train.<language>-en.<language> and train.<language>-en.en")
    parser.add_argument(
        "--vocabulary-size",
        type=int,
        default=64_000,
        help="tokens in all, four of them special; default: %(default)s",
    )
    parser.add_argument(
        "--max-lines", type=int, default=100_000, help="pairs to read per language; default: %(default)s"
    )
    options = parser.parse_args(arguments)
    with report_errors():
        folder = CORPORA["parallel_text"].find_root("parallel_text", options.folder)
        require(options.vocabulary_size >= 1, "--vocabulary-size", options.vocabulary_size, "1 or more")
        require(options.max_lines >= 1, "--max-lines", options.max_lines, "1 or more")
        found = lines(folder, options.max_lines)
        tokenizer = Tokenizer.train(found, options.vocabulary_size, folder / "tokenizer.model")
    print(f"{tokenizer.path}: {tokenizer.vocabulary_size:,} tokens, SHA-256 {tokenizer.sha256}")
