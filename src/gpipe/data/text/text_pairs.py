"""From pairs of lines to pairs of token ids, leaving out what cannot be trained on."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpipe.data.text.parallel_corpus import LanguagePairs, Skipped
from gpipe.data.text.sentences import Sentences
from gpipe.data.text.tokenizer import Tokenizer

_BLOCK = 50_000  # pairs that are held as text at a time,
_BLOCK_CHARACTERS = 1 << 24  # or fewer, of so many characters


class TextPair(NamedTuple):
    """A sentence, the same in the target language, and where they are: `file` and the number of the line, from 1."""

    source: str
    target: str
    file: str
    line: int


_Encoded = tuple[TextPair, list[int], list[int]]


class Encoder:
    """Turn lines into token ids, counting what is left out: pairs with an empty side, and long ones.

    max_tokens: the most tokens of a sentence of either side, END included.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._targets: dict[str, list[int]] = {}
        self.empty = Skipped("with an empty line")
        self.long = long_pairs(max_tokens)

    def encode(self, pairs: Iterable[TextPair]) -> LanguagePairs:
        """Return the pairs of one language as ids; possibly none are left."""
        blocks = list(self.encode_blocks(pairs)) or [self._encode_block([])]
        sources = Sentences.join([block.sources for block in blocks])
        return LanguagePairs(sources, Sentences.join([block.targets for block in blocks]))

    def encode_blocks(self, pairs: Iterable[TextPair]) -> Iterator[LanguagePairs]:
        """Yield the pairs of one language as ids, some at a time."""
        return map(self._encode_block, _blocks(pairs))

    def _encode_block(self, block: list[TextPair]) -> LanguagePairs:
        sources = self._tokenizer.encode_lines([pair.source for pair in block])
        targets = self._encode_targets([pair.target for pair in block])
        encoded = list(zip(block, sources, targets, strict=True))
        full = [each for each in encoded if each[1] and each[2]]
        short = [each for each in full if max(len(each[1]), len(each[2])) < self._max_tokens]  # and END
        _count(self.empty, encoded, full)
        _count(self.long, full, short)
        size = self._tokenizer.vocabulary_size
        kept = Sentences.pack([ids for _, ids, _ in short], size), Sentences.pack([ids for _, _, ids in short], size)
        return LanguagePairs(*kept)

    def _encode_targets(self, lines: list[str]) -> list[list[int]]:
        """Encode English lines, remembering some: in a corpus of many languages each of them comes many times."""
        if len(self._targets) > _BLOCK:
            self._targets.clear()
        new = [line for line in dict.fromkeys(lines) if line not in self._targets]
        self._targets.update(zip(new, self._tokenizer.encode_lines(new), strict=True))
        return [self._targets[line] for line in lines]


def _count(skipped: Skipped, before: list[_Encoded], after: list[_Encoded]) -> None:
    """Count what is in `before` and not in `after`, which are both in order."""
    if len(after) < len(before):
        first = next((old for old, new in zip(before, after, strict=False) if old is not new), before[len(after)])[0]
        skipped.add(len(before) - len(after), f"{first.file}:{first.line}")


def long_pairs(max_tokens: int) -> Skipped:
    """Return the counter of the pairs that are left out as too long."""
    return Skipped(f"longer than {max_tokens} tokens (data.max_tokens)")


def _blocks(pairs: Iterable[TextPair]) -> Iterator[list[TextPair]]:
    block: list[TextPair] = []
    num_characters = 0
    for pair in pairs:
        block.append(pair)
        num_characters += len(pair.source) + len(pair.target)
        if len(block) == _BLOCK or num_characters >= _BLOCK_CHARACTERS:
            yield block
            block, num_characters = [], 0
    if block:
        yield block
