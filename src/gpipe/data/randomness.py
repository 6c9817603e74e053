"""The data's randomness as a function of the seed.

The order depends on (seed, epoch), the augmentation of an image on (seed, epoch, index). So neither the number of
workers, nor the batch size, nor a resume changes what a sample looks like.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

# SeedSequence pads short keys with zeros, so (seed, epoch) alone would be the key of sample 0 of that epoch.
_ORDER, _AUGMENTATION, _WALK = 1, 2, 3


def draw_epoch_order(seed: int, epoch: int, num_examples: int) -> NDArray[np.int64]:
    """Return the indices of all examples in the order in which this epoch shows them."""
    return make_epoch_generator(seed, epoch).permutation(num_examples)


def make_epoch_generator(seed: int, epoch: int, shard: int = 0) -> np.random.Generator:
    """Return the generator of all that is drawn for a whole epoch, or for one shard of it."""
    # Shard 0 adds nothing to the key, so that the order of an epoch of one shard stays what it has always been.
    return np.random.default_rng(np.random.SeedSequence([seed, _ORDER, epoch, *[shard] * (shard > 0)]))


def make_walk_generator(seed: int, *key: int) -> np.random.Generator:
    """Return the generator of a walk through a language's pairs.

    Args:
        seed: of the run.
        key: (language, pass) or (language, pass, block) for an order, nothing for where the walks begin.
    """
    return np.random.default_rng(np.random.SeedSequence([seed, _WALK, *(number + 1 for number in key)]))


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed the CPU generators of torch, numpy and random for one sample, for transforms that draw from them."""
    words = np.random.SeedSequence([seed, _AUGMENTATION, epoch, index]).generate_state(2)
    sample_seed = int(words[0]) << 32 | int(words[1])
    torch.default_generator.manual_seed(sample_seed)  # torch.manual_seed would also reach for the accelerators
    np.random.seed(words[0])
    random.seed(sample_seed)


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Leave the global CPU generators of torch, numpy and random as they were before the block."""
    torch_state = torch.default_generator.get_state()
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
