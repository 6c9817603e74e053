"""The data's randomness as a function of the seed.

The order depends on (seed, epoch), the augmentation of an image on (seed, epoch, index), the mixing of a mini-batch on
(seed, epoch, number). The number of workers and resuming change no sample. Neither does the batch size, without mixing.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# SeedSequence pads short keys with zeros, so (seed, epoch) alone would be the key of sample 0 of that epoch.
_ORDER, _AUGMENTATION, _WALK, _MIXING = 1, 2, 3, 4


def make_epoch_generator(seed: int, epoch: int, shard: int = 0) -> np.random.Generator:
    """Return the generator of an epoch, or of one shard of it."""
    # Shard 0 adds nothing to the key, so that an epoch of one shard keeps the order from before there were shards.
    return np.random.default_rng(np.random.SeedSequence([seed, _ORDER, epoch, *[shard] * (shard > 0)]))


def make_walk_generator(seed: int, *key: int) -> np.random.Generator:
    """Return the generator of walks through languages' pairs.

    The key is (language, pass) or (language, pass, block) for an order, and empty for the starting points.
    """
    return np.random.default_rng(np.random.SeedSequence([seed, _WALK, *(number + 1 for number in key)]))


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed the global CPU generators of torch, numpy and random for the transform of one sample."""
    _seed_generators(seed, _AUGMENTATION, epoch, index)


def seed_mini_batch(seed: int, epoch: int, number: int) -> None:
    """Seed the global CPU generators of torch, numpy and random for the mixing of one mini-batch."""
    _seed_generators(seed, _MIXING, epoch, number)


def _seed_generators(*key: int) -> None:
    words = np.random.SeedSequence(key).generate_state(2)
    seed = int(words[0]) << 32 | int(words[1])
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the accelerators
    np.random.seed(words[0])
    random.seed(seed)


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore the global CPU generators of torch, numpy and random after the block."""
    torch_state = torch.default_generator.get_state()
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
