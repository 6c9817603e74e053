"""Images of noise, as many pixels as photographs have: there is nothing to learn in them, they measure speed."""

from pathlib import Path

import numpy as np
from PIL import Image

from gpipe.data.images.source import SPLITS, Source

# About ImageNet's: its images have 500 x 375 pixels or so.
_WIDTH, _HEIGHT = 500, 375
_NUM_CLASSES = 1000
_NUM_IMAGES = {"train": 100_000, "test": 1_000}
_IMAGES, _LABELS = 0x1A6, 0x1AB  # keep these numbers apart from those of other random data
_NUM_OFFSETS = 1 << 20
_SCATTER = 0x9E3779B1  # odd: no two images begin at the same offset


class RandomImages:
    """Hold images of evenly distributed pixels; image and label i are functions of the split and of i.

    An image is a piece of one strip of noise, so that it costs no more than a copy.
    """

    def __init__(self, split: str) -> None:
        self._split = SPLITS.index(split)
        generator = np.random.default_rng([_LABELS, self._split])
        self.labels = generator.integers(_NUM_CLASSES, size=_NUM_IMAGES[split])
        self._noise = np.random.default_rng([_IMAGES, self._split]).bytes(_WIDTH * _HEIGHT * 3 + _NUM_OFFSETS)
        self.class_names = [str(label) for label in range(_NUM_CLASSES)]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """Return image `index`, RGB."""
        start = index * _SCATTER % _NUM_OFFSETS
        return Image.frombytes("RGB", (_WIDTH, _HEIGHT), self._noise[start : start + _WIDTH * _HEIGHT * 3])


def open_random_images(_root: Path, split: str) -> RandomImages:
    """Open a split: 100,000 training or 1,000 test images of 500 x 375 pixels, 1,000 classes."""
    return RandomImages(split)


RANDOM_IMAGES = Source(open=open_random_images)
