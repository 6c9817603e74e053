"""Text to token ids and back, with a SentencePiece model that has this project's special ids."""

import re
import stat
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from gpipe.durable_files import replacing

# Every vocabulary begins with these ids, in the order of fairseq's Dictionary. A SentencePiece model trained here and a
# fairseq Dictionary with the same pieces therefore have the same ids.
BEGIN, PADDING, END, UNKNOWN = range(4)
NUM_SPECIAL = 4

# The share of the characters that get an id; the rest are spelt in bytes. All characters of the embedded corpus, mostly
# rare Chinese ones, would take 2,600 of its 4,000 ids and leave few for words.
CHARACTER_COVERAGE = 0.998
_MAX_BYTES = 2**28
# SentencePiece leaves out lines with this character, which it uses itself, and lines of more bytes than it is told.
_RESERVED, _LINE_BYTES = "\u2585", 1_000_000


def clean_line(text: str) -> str:
    """Return the text as one line: strip it, and replace every run of white space with one space."""
    return " ".join(text.split())


class Tokenizer:
    """Cuts text into pieces of one vocabulary, which all languages and both sides share.

    Args:
        path: a SentencePiece model with the special ids above, such as `train` writes.

    Raises:
        ValueError: the file is not such a model.
    """

    def __init__(self, path: str | Path) -> None:
        import sentencepiece

        self.path = Path(path).expanduser()
        try:
            status = self.path.stat()
            if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= _MAX_BYTES:
                raise RuntimeError(f"expected a file of 1 to {_MAX_BYTES:,} bytes")  # /dev/zero has no end
            model = self.path.read_bytes()
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
        except FileNotFoundError as error:
            raise ValueError(f"the tokenizer {self.path} does not exist: set data.tokenizer=<model file>") from error
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{self.path} is not a SentencePiece model ({error}): choose another file") from error
        found = [getattr(self._processor, f"{name}_id")() for name in ("bos", "pad", "eos", "unk")]
        if found != [BEGIN, PADDING, END, UNKNOWN]:
            raise ValueError(
                f"the tokenizer {self.path} has the special ids {found}, expected [0, 1, 2, 3] for bos, pad, eos and "
                "unk: train it with Tokenizer.train, or with those options of SentencePiece"
            )

    @cached_property
    def sha256(self) -> str:
        """The model file's SHA-256, hexadecimal; checkpoints identify their tokenizer by it."""
        return sha256(self.path.read_bytes()).hexdigest()

    @property
    def vocabulary_size(self) -> int:
        """The number of ids, including the special ones."""
        return int(self._processor.get_piece_size())

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without END; a run of white space counts as one space."""
        return self.encode_lines([text])[0]

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of many texts, much faster than `encode` one by one."""
        encoded: list[list[int]] = self._processor.encode([clean_line(line) for line in lines], out_type=int)
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids below the vocabulary's size; special ids have no text."""
        most = self.vocabulary_size - 1
        for number in ids:
            if not 0 <= number <= most:
                raise ValueError(
                    f"the id {number} is not one of {self.path}, expected 0 to {most}: use the tokenizer that made it"
                )
        return str(self._processor.decode([int(number) for number in ids if number >= NUM_SPECIAL]))

    def pieces(self) -> list[str]:
        """Return the piece of every id."""
        return [str(self._processor.id_to_piece(number)) for number in range(self.vocabulary_size)]

    def write_dictionary(self, path: str | Path) -> None:
        """Write a dict.txt that gives every piece the same id in fairseq.

        It is for `fairseq-preprocess --srcdict ... --tgtdict ...` on text that was cut into these pieces, separated by
        spaces.
        """
        # fairseq itself adds the special tokens in front; the numbers are counts, which nothing reads.
        Path(path).write_text("".join(f"{piece} 1\n" for piece in self.pieces()[NUM_SPECIAL:]), "utf-8")

    @classmethod
    def train(cls, lines: Iterable[str], vocabulary_size: int, path: str | Path) -> "Tokenizer":
        """Train a model on lines of text, write it to path and open it.

        The same lines give the same file on every machine: byte-pair encoding merges by integer counts, nothing is
        random, and one thread keeps the order. Only white space is normalised: SentencePiece's own rule would drop the
        joiners that Persian and the scripts of India need. Text without a piece is spelt in bytes, so any text in any
        script survives a round trip.

        Raises:
            ValueError: the lines are too few for such a large vocabulary.
        """
        import sentencepiece

        path, cleaned = Path(path), [clean_line(line.replace(_RESERVED, " ")) for line in lines]
        try:
            with replacing(path) as partial, partial.open("wb") as stream:
                sentencepiece.SentencePieceTrainer.train(
                    sentence_iterator=iter(cleaned),
                    model_writer=stream,
                    model_type="bpe",
                    vocab_size=vocabulary_size,
                    character_coverage=CHARACTER_COVERAGE,
                    byte_fallback=True,
                    normalization_rule_name="identity",
                    bos_id=BEGIN,
                    pad_id=PADDING,
                    eos_id=END,
                    unk_id=UNKNOWN,
                    input_sentence_size=0,
                    shuffle_input_sentence=False,
                    max_sentence_length=max([_LINE_BYTES, *(len(line.encode()) for line in cleaned)]),
                    num_threads=1,
                    minloglevel=2,
                )
        except RuntimeError as error:
            too_few = "required_chars" in str(error)
            remedy = "raise it" if too_few else "lower it, or give more text"
            need = "fewer than their characters need" if too_few else "more than they have pieces"
            limit = re.search(r"(?:vs|<=) (\d+)", str(error))
            expected = f", expected at {'least' if too_few else 'most'} {limit[1]}" if limit else ""
            raise ValueError(
                f"these lines cannot make a vocabulary of {vocabulary_size} tokens, {need}{expected}: {remedy}."
            ) from error
        return cls(path)
