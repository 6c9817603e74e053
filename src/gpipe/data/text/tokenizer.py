"""Text to token ids and back, by a SentencePiece model whose special ids are those of this project."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from gpipe.data.text.english_split import clean_line
from gpipe.data.text.special_tokens import BEGIN, END, NUM_SPECIAL, PADDING, UNKNOWN

# Of the characters of the embedded corpus; the rest are spelt in bytes. All of them would take 2,600 of its 4,000 ids,
# mostly rare Chinese characters, and leave few for words.
CHARACTER_COVERAGE = 0.998


class Tokenizer:
    """Cut text into pieces of one vocabulary, the same for all languages and both sides.

    path: a SentencePiece model. It must have the special ids of `special_tokens`, which `train` gives it.
    Raises ValueError for a file that is no such model.
    """

    def __init__(self, path: str | Path) -> None:
        import sentencepiece

        self.path = Path(path).expanduser()
        try:
            model = self.path.read_bytes()
            if not model:
                raise RuntimeError("it is empty")
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
        except FileNotFoundError as error:
            raise ValueError(f"the tokenizer {self.path} does not exist: set data.tokenizer=<model file>") from error
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{self.path} is no SentencePiece model ({error}): choose another file") from error
        ids = {name: getattr(self._processor, f"{name}_id")() for name in ("bos", "pad", "eos", "unk")}
        ours = {"bos": BEGIN, "pad": PADDING, "eos": END, "unk": UNKNOWN}
        if ids != ours:
            found, expected = (", ".join(f"{name} {number}" for name, number in each.items()) for each in (ids, ours))
            raise ValueError(
                f"the tokenizer {self.path} has the special ids {found}, expected {expected}: train it with "
                "Tokenizer.train, or with those options of SentencePiece"
            )

    @cached_property
    def sha256(self) -> str:
        """The model file's SHA-256, hexadecimal: by it a checkpoint knows its tokenizer again."""
        return sha256(self.path.read_bytes()).hexdigest()

    @property
    def vocabulary_size(self) -> int:
        """The number of ids, the special ones included."""
        return int(self._processor.get_piece_size())

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without END; runs of white space count as one space."""
        return self.encode_lines([text])[0]

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of many texts, as `encode` does for one; much faster than one by one."""
        encoded: list[list[int]] = self._processor.encode([clean_line(line) for line in lines], out_type=int)
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; the special ones have none. Raises ValueError for an id outside the vocabulary."""
        wrong = next((number for number in ids if not 0 <= number < self.vocabulary_size), None)
        if wrong is not None:
            raise ValueError(f"the id {wrong} lies outside the vocabulary of {self.vocabulary_size} tokens")
        return str(self._processor.decode([int(number) for number in ids if number >= NUM_SPECIAL]))

    def pieces(self) -> list[str]:
        """Return the piece of every id."""
        return [str(self._processor.id_to_piece(number)) for number in range(self.vocabulary_size)]

    def write_dictionary(self, path: str | Path) -> None:
        """Write a dict.txt in which fairseq gives every piece the id that it has here.

        For `fairseq-preprocess --srcdict ... --tgtdict ...` on text that was cut into these pieces, parted by spaces.
        """
        # fairseq adds its own special tokens in front; the numbers are counts, which nothing reads.
        Path(path).write_text("".join(f"{piece} 1\n" for piece in self.pieces()[NUM_SPECIAL:]), "utf-8")

    @classmethod
    def train(cls, lines: Iterable[str], vocabulary_size: int, path: str | Path) -> "Tokenizer":
        """Train a model on lines of text, write it to path and open it.

        The same lines give the same file on every machine: byte-pair encoding merges by counts, which are whole
        numbers; nothing is drawn at random, and one thread keeps their order. Text is not normalised (apart from white
        space): SentencePiece's own rule would drop the joiners that Persian and the scripts of India need. What has
        no piece of its own is spelt in bytes, so that every text can be written and read back, in any script.
        Raises ValueError where the lines do not suffice for so large a vocabulary.
        """
        import sentencepiece

        path = Path(path)
        try:
            with path.open("wb") as stream:
                sentencepiece.SentencePieceTrainer.train(
                    sentence_iterator=iter([clean_line(line) for line in lines]),
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
                    max_sentence_length=1_000_000,
                    num_threads=1,
                    minloglevel=2,
                )
        except RuntimeError as error:
            path.unlink()
            raise ValueError(
                f"no vocabulary of {vocabulary_size} tokens can be made of these lines: {error}"
            ) from error
        return cls(path)
