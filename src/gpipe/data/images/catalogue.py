"""The data sets by name."""

from pathlib import Path

from gpipe.data.images.birdsnap import BIRDSNAP
from gpipe.data.images.cifar import CIFAR10, CIFAR100
from gpipe.data.images.digits import DIGITS, MNIST_5K
from gpipe.data.images.fashion_mnist import FASHION_MNIST, FASHION_MNIST_EMBEDDED
from gpipe.data.images.fgvc_aircraft import FGVC_AIRCRAFT
from gpipe.data.images.food101 import FOOD101
from gpipe.data.images.image_set import ImageSet
from gpipe.data.images.imagenet import IMAGENET
from gpipe.data.images.oxford_pets import OXFORD_PETS
from gpipe.data.images.random_images import RANDOM_IMAGES
from gpipe.data.images.source import SPLITS, Source
from gpipe.data.images.stanford_cars import STANFORD_CARS
from gpipe.data.text.corpora import CORPORA, check_corpus

IMAGE_SETS: dict[str, Source] = {
    "imagenet": IMAGENET,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "stanford_cars": STANFORD_CARS,
    "oxford_pets": OXFORD_PETS,
    "food101": FOOD101,
    "fgvc_aircraft": FGVC_AIRCRAFT,
    "birdsnap": BIRDSNAP,
    "fashion_mnist_embedded": FASHION_MNIST_EMBEDDED,
    "fashion_mnist": FASHION_MNIST,
    "digits": DIGITS,
    "mnist_5k": MNIST_5K,
    "random_images": RANDOM_IMAGES,
}
GENERATED = ("random_tokens",)  # made up by the run, from its settings


def check_data(name: str, root: str | Path | None = None) -> None:
    """Look for a data set of any kind, as `check_image_set` does for images. Raises the same."""
    if name in CORPORA:
        check_corpus(name, root)
    elif name not in GENERATED:
        check_image_set(name, root)


def check_image_set(name: str, root: str | Path | None = None) -> Path:
    """Find the folder of an image set in well under a second, decoding nothing.

    Returns the folder (meaningless for the sets that come with a package). Raises DataMissing, and ValueError for an
    unknown name.
    """
    return _source(name).find_root(name, root)


def open_image_set(name: str, split: str, root: str | Path | None = None) -> ImageSet:
    """Open one split, "train" or "test", of a named image set.

    root: the folder that holds the set; None means its usual place. For ImageNet "test" means the 50,000 validation
    images, and for Oxford Pets and FGVC Aircraft "train" means their training and validation images together, as in
    the paper's Table 4. Raises DataMissing, and ValueError for an unknown name or split, or a damaged file.
    """
    _check_split(split)
    folder = check_image_set(name, root)
    return IMAGE_SETS[name].open(folder, split)


def count_differences(name: str, split: str, image_set: ImageSet) -> list[str]:
    """Compare an opened split with Table 4 of the paper.

    Returns one sentence for each number that differs (classes, images), with both numbers; none for a set that is not
    in the table. Raises ValueError for an unknown name or split.
    """
    _check_split(split)
    table = _source(name).table
    if table is None:
        return []
    note = f" ({table.notes[split]})" if split in table.notes else ""
    images = "training images" if split == "train" else "test images"
    return [
        f"{name} has {found:,} {what}, but Table 4 of the paper says {expected:,}{why}"
        for what, found, expected, why in (
            ("classes", len(image_set.class_names), table.num_classes, ""),
            (images, len(image_set), table.num_images(split), note),
        )
        if found != expected
    ]


def _source(name: str) -> Source:
    if name not in IMAGE_SETS:
        raise ValueError(f"unknown image set {name!r}: choose one of {', '.join(IMAGE_SETS)}")
    return IMAGE_SETS[name]


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
