"""Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): product photographs, 28x28 grey, 10 classes."""

from importlib.resources import files
from pathlib import Path

import numpy as np

from gpipe.data.images.idx import read_idx
from gpipe.data.images.image_set import ImageArray
from gpipe.data.images.source import Source

CLASS_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
IMAGE_SHAPE = (28, 28)
_PREFIXES = {"train": "train", "test": "t10k"}
_MAX_IMAGES = {"train": 60_000, "test": 10_000}


def open_embedded(_root: Path, split: str) -> ImageArray:
    """Open the balanced subset that comes with the package: 6,000 training and 1,000 test images."""
    with files("gpipe.data").joinpath("embedded", "fashion_mnist_subset.npz").open("rb") as stream:
        arrays = np.load(stream, allow_pickle=False)
        return ImageArray(arrays[f"{split}_images"], arrays[f"{split}_labels"], CLASS_NAMES)


def open_full(root: Path, split: str) -> ImageArray:
    """Open the original files below root: 60,000 training and 10,000 test images.

    Raises ValueError, which names the file, where one is damaged or the two of a split do not belong together.
    """
    prefix, max_items = _PREFIXES[split], _MAX_IMAGES[split]
    images = read_idx(root / f"{prefix}-images-idx3-ubyte.gz", IMAGE_SHAPE, max_items)
    labels_path = root / f"{prefix}-labels-idx1-ubyte.gz"
    labels = read_idx(labels_path, (), max_items)
    if len(labels) != len(images):
        raise ValueError(
            f"{labels_path} has {len(labels)} labels for {len(images)} images; replace both with the original files"
        )
    if labels.max() >= len(CLASS_NAMES):
        raise ValueError(f"{labels_path} has the label {labels.max()}, expected 0 to 9; replace it with the original")
    return ImageArray(images, labels, CLASS_NAMES)


FASHION_MNIST_EMBEDDED = Source(open=open_embedded)

FASHION_MNIST = Source(
    open=open_full,
    required=tuple(
        f"{prefix}-{kind}-ubyte.gz" for prefix in _PREFIXES.values() for kind in ("images-idx3", "labels-idx1")
    ),
    tree="""\
  <data.root>/train-images-idx3-ubyte.gz
  <data.root>/train-labels-idx1-ubyte.gz
  <data.root>/t10k-images-idx3-ubyte.gz
  <data.root>/t10k-labels-idx1-ubyte.gz""",
    how_to_get=(
        "on Debian or Ubuntu `apt-get install dataset-fashion-mnist`; without root `apt-get download "
        "dataset-fashion-mnist`, `dpkg-deb -x dataset-fashion-mnist_*.deb fashion-mnist` and "
        "data.root=fashion-mnist/usr/share/datasets/fashion-mnist."
    ),
    default_root=Path("/usr/share/datasets/fashion-mnist"),
)
