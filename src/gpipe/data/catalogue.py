"""The image sets by name."""

from pathlib import Path

from gpipe.data.fashion_mnist import FASHION_MNIST, FASHION_MNIST_EMBEDDED
from gpipe.data.image_set import ImageSet
from gpipe.data.imagenet import IMAGENET
from gpipe.data.source import SPLITS, Source

IMAGE_SETS: dict[str, Source] = {
    "fashion_mnist_embedded": FASHION_MNIST_EMBEDDED,
    "fashion_mnist": FASHION_MNIST,
    "imagenet": IMAGENET,
}


def check_image_set(name: str, root: str | Path | None = None) -> Path:
    """Find the folder of an image set in well under a second, decoding nothing.

    Returns the folder (meaningless for the embedded set). Raises DataMissing, and ValueError for an unknown name.
    """
    if name not in IMAGE_SETS:
        raise ValueError(f"unknown image set {name!r}: choose one of {', '.join(IMAGE_SETS)}")
    return IMAGE_SETS[name].find_root(name, root)


def open_image_set(name: str, split: str, root: str | Path | None = None) -> ImageSet:
    """Open one split, "train" or "test", of a named image set.

    root: the folder that holds the set; None means its usual place. For ImageNet "test" means the 50,000 validation
    images, as in the paper's Table 4. Raises DataMissing, and ValueError for an unknown name or split.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
    folder = check_image_set(name, root)
    return IMAGE_SETS[name].open(folder, split)
