"""Choose the pairs of each language that an epoch shows: a walk that is a function of (seed, epoch)."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpipe.data.randomness import make_walk_generator

# Neighbouring pairs that are shuffled together. A pass through a larger language visits its blocks in random order, so
# it permutes only the blocks, and reads the disk in pieces of a few hundred kilobytes. With blocks of 2,048
# pairs, the pages that the system maps around each piece took up to 1.7 times the memory (experiments/text_scale.py).
BLOCK_SIZE = 1 << 14


def sampling_probabilities(num_pairs: ArrayLike, temperature: float) -> NDArray[np.float64]:
    """Return the probability of drawing each language, proportional to (its share of the pairs)^(1 / temperature).

    Temperature 1 draws by size; a high one draws evenly. The paper (section 5) raises the shares to the power of 0.7:
    temperature 1 / 0.7.
    """
    shares = np.asarray(num_pairs, dtype=np.float64)
    weights = (shares / shares.max()) ** (1 / temperature)  # at low temperatures, undivided shares would underflow
    return np.asarray(weights / weights.sum())


class SentenceWalk:
    """Walks through the pairs of each language repeatedly, each time in a new order.

        language with 4 pairs    | 2 0 3 1 | 1 3 2 0 | 0 1 ...      passes
        5 pairs per epoch        | epoch 0   | epoch 1   |

        a pass through a large language    | block 2, shuffled | block 0, shuffled | block 1, shuffled | rest |

    Over all epochs, no pair comes twice before all others of its language have come once. Where an epoch begins depends
    only on its number. A language whose share of an epoch is 0.3 pairs appears in three of ten epochs.

    Deviation: the paper does not say how it shuffled 25 billion examples; we cut a language into blocks of 16,384
    neighbouring pairs, and in each pass shuffle the blocks and then the pairs within each block.

    Args:
        num_pairs: the number of pairs of each language.
        draws: the number of pairs of each language that an epoch draws on average; need not be whole.
        seed: the run's seed.
    """

    def __init__(self, num_pairs: NDArray[np.int64], draws: NDArray[np.float64], seed: int) -> None:
        self._num_pairs = num_pairs
        self._draws = draws
        self._seed = seed
        self._first = make_walk_generator(seed).random(len(draws))

    def draw(self, begin: float, end: float) -> list[NDArray[np.int64]]:
        """Return the indices of each language's pairs between two points of the walk, in epochs.

        Adjacent stretches, such as 3 to 3.5 and 3.5 to 4, neither overlap nor leave a gap.
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
        """Yield the steps first .. last - 1 of one pass, block by block."""
        num_blocks = -(-size // BLOCK_SIZE)
        shift, blocks = 0, np.arange(num_blocks)
        if num_blocks > 1:
            generator = make_walk_generator(self._seed, language, number, num_blocks)
            # The remainder is a smaller block and comes last; the shift puts other pairs into it in each pass.
            shift = int(generator.integers(size))
            blocks[: size // BLOCK_SIZE] = generator.permutation(size // BLOCK_SIZE)
        for place in range(first // BLOCK_SIZE, -(-last // BLOCK_SIZE)):
            begin, block = place * BLOCK_SIZE, int(blocks[place])
            rows = block * BLOCK_SIZE + self._order(language, number, block, min(BLOCK_SIZE, size - begin))
            yield (shift + rows[max(0, first - begin) : last - begin]) % size

    def _order(self, language: int, number: int, block: int, size: int) -> NDArray[np.int64]:
        # Block 0 adds nothing to the key, so that small corpora keep the walk from before there were blocks.
        key = (language, number, block) if block else (language, number)
        return make_walk_generator(self._seed, *key).permutation(size)
