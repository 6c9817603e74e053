"""Which pairs an epoch draws of each language: a walk that is a function of (seed, epoch)."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gpipe.data.index_permutation import IndexPermutation
from gpipe.data.randomness import walk_generator

# Pairs that lie side by side and are shuffled together. A pass through a larger language visits its blocks in random
# order: so no permutation of all its pairs is needed, and the disk is read in pieces of some hundred kilobytes. With
# 2,048 pairs, what the system maps around each piece took up to 1.7 times the memory (experiments/text_scale.py).
BLOCK_SIZE = 1 << 14


class SentenceWalk:
    """Walk through the pairs of each language again and again, each time in an order of its own.

        language with 4 pairs    | 2 0 3 1 | 1 3 2 0 | 0 1 ...      passes
        5 pairs per epoch        | epoch 0   | epoch 1   |

        a pass through a large language    | block 2, shuffled | block 0, shuffled | block 1, shuffled | rest |

    So no pair comes twice before all others of its language have come, over all epochs; and where an epoch begins
    follows from its number alone. A language whose share of an epoch is 0.3 pairs is in three of ten epochs.

    num_pairs: of each language. draws: pairs of each language that an epoch draws, on average; need not be whole.

    Deviation: the paper does not say how it shuffled 25 billion examples; here a pass through a language cuts it into
    blocks of 16,384 neighbouring pairs, shuffles the blocks, and then the pairs within each block.
    """

    def __init__(self, num_pairs: NDArray[np.int64], draws: NDArray[np.float64], seed: int) -> None:
        self._num_pairs = num_pairs
        self._draws = draws
        self._seed = seed
        self._first = walk_generator(seed).random(len(draws))

    def draw(self, begin: float, end: float) -> list[NDArray[np.int64]]:
        """Return the indices of the pairs of each language from one place of the walk to another, counted in epochs.

        Stretches that meet, such as from 3 to 3.5 and from 3.5 to 4, share no step and miss none.
        """
        starts, ends = (np.floor(place * self._draws + self._first).astype(np.int64) for place in (begin, end))
        return [self._walk(number, *bounds) for number, bounds in enumerate(zip(starts, ends, strict=True))]

    def _walk(self, language: int, start: int, end: int) -> NDArray[np.int64]:
        size = int(self._num_pairs[language])
        parts = [np.empty(0, np.int64)]
        while start < end:
            number, first = divmod(start, size)
            last = min(size, first + end - start)
            parts += self._pass(language, int(number), size, int(first), int(last))
            start += last - first
        return np.concatenate(parts)

    def _pass(self, language: int, number: int, size: int, first: int, last: int) -> Iterator[NDArray[np.int64]]:
        """Yield the steps of one pass from `first` to before `last`, block by block."""
        num_blocks = -(-size // BLOCK_SIZE)
        shift, blocks = 0, None
        if num_blocks > 1:
            generator = walk_generator(self._seed, language, number, num_blocks)
            # What is left over makes a smaller block, which comes last; with the shift it is another one in each pass.
            shift, blocks = int(generator.integers(size)), IndexPermutation(size // BLOCK_SIZE, generator)
        for place in range(first // BLOCK_SIZE, -(-last // BLOCK_SIZE)):
            begin = place * BLOCK_SIZE
            block = place if blocks is None or place == len(blocks) else blocks[place]
            rows = block * BLOCK_SIZE + self._order(language, number, block, min(BLOCK_SIZE, size - begin))
            yield (shift + rows[max(0, first - begin) : last - begin]) % size

    def _order(self, language: int, number: int, block: int, size: int) -> NDArray[np.int64]:
        # Block 0 keeps the key that passes had before there were blocks: small corpora are walked as ever.
        key = (language, number, block) if block else (language, number)
        return walk_generator(self._seed, *key).permutation(size)
