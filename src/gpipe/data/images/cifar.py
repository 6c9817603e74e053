"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): photographs, 32x32 colour."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gpipe.data.images.image_set import ImageArray
from gpipe.data.images.source import Source, TableCounts
from gpipe.data.images.torchvision_set import torchvision_class


def open_cifar(root: Path, split: str, *, class_name: str) -> ImageArray:
    """Let torchvision read a split into memory: 50,000 training or 10,000 test images.

    class_name: CIFAR10 or CIFAR100. Raises ValueError, which names the file, where one is not the original.
    """
    cifar = torchvision_class(class_name)
    try:
        # The files are pickles, which can run code while they are read. torchvision compares the md5 checksum of each
        # with the original's before it opens it, so that no unknown pickle is ever read: whoever changes this keeps it.
        data_set = cifar(root, train=split == "train", download=False)
    except RuntimeError as error:
        raise ValueError(_complain(cifar, root / cifar.base_folder)) from error
    return ImageArray(data_set.data, np.array(data_set.targets), data_set.classes)


def _complain(cifar: Any, folder: Path) -> str:
    """Say which file is not the original one; torchvision says only that there is one."""
    from torchvision.datasets.utils import check_integrity

    checksums = [*cifar.train_list, *cifar.test_list, (cifar.meta["filename"], cifar.meta["md5"])]
    changed = next(name for name, checksum in checksums if not check_integrity(str(folder / name), checksum))
    return f"{folder / changed} is not the original file, its md5 checksum differs; unpack {cifar.filename} again"


def _describe(folder: str, files: tuple[str, ...], class_name: str, archive: str, table: TableCounts) -> Source:
    return Source(
        open=partial(open_cifar, class_name=class_name),
        required=tuple(f"{folder}/{name}" for name in files),
        tree="\n".join(f"  <data.root>/{folder}/{name}" for name in files),
        how_to_get=f"download {archive} from cs.toronto.edu/~kriz/cifar.html and unpack it in <data.root>.",
        table=table,
    )


CIFAR10 = _describe(
    "cifar-10-batches-py",
    (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"),
    "CIFAR10",
    "cifar-10-python.tar.gz",
    TableCounts(num_classes=10, num_train_images=50_000, num_test_images=10_000),
)

CIFAR100 = _describe(
    "cifar-100-python",
    ("train", "test", "meta"),
    "CIFAR100",
    "cifar-100-python.tar.gz",
    TableCounts(num_classes=100, num_train_images=50_000, num_test_images=10_000),
)
