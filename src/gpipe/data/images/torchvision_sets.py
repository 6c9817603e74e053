"""Image sets that torchvision reads; the result is checked against the files on disk."""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from gpipe.data.images.image_set import ImageArray, ImageFiles, are_files, check_name

_MATLAB_HEADER_BYTES = 128
_COMPRESSED = 15  # the type of an element packed by zlib
_MAX_UNPACKED_BYTES = 1 << 26  # the annotations of the Stanford Cars unpack to a tenth of it


def open_cifar(class_name: str, root: Path, split: str) -> ImageArray:
    """Open CIFAR10 or CIFAR100 (Krizhevsky 2009), 32x32 colour: 50,000 training or 10,000 test images, in memory."""
    cifar = torchvision_class(class_name)
    try:
        # Keep this check: the files are pickles, which can run code. torchvision opens a file only if its md5 checksum
        # is the original's.
        data_set = cifar(root, train=split == "train", download=False)
    except RuntimeError as error:
        raise ValueError(
            f"{root / cifar.base_folder} has a file that is not the original: its md5 checksum differs; unpack "
            f"{cifar.filename} again"
        ) from error
    return ImageArray(data_set.data, np.array(data_set.targets), data_set.classes)


def open_stanford_cars(root: Path, split: str) -> ImageFiles:
    """List the images of a split of the Stanford Cars in the order of its annotations, which are MATLAB files."""
    folder = root / "stanford_cars"
    listing = folder / ("devkit/cars_train_annos.mat" if split == "train" else "cars_test_annos_withlabels.mat")
    for path in (listing, folder / "devkit/cars_meta.mat"):
        check_unpacked_size(path)
    return _open_listed("StanfordCars", root, folder / f"cars_{split}", listing, entry="annotation", split=split)


def open_oxford_pets(root: Path, split: str) -> ImageFiles:
    """List the images of a split of Oxford-IIIT Pets in the order of its list."""
    folder, official_split = root / "oxford-iiit-pet", "trainval" if split == "train" else split
    listing = folder / "annotations" / f"{official_split}.txt"
    return _open_listed("OxfordIIITPet", root, folder / "images", listing, split=official_split)


def open_fgvc_aircraft(root: Path, split: str) -> ImageFiles:
    """List the images of a split of FGVC Aircraft, by variant."""
    folder, official_split = root / "fgvc-aircraft-2013b" / "data", "trainval" if split == "train" else split
    listing = folder / f"images_variant_{official_split}.txt"
    return _open_listed(
        "FGVCAircraft", root, folder / "images", listing, split=official_split, annotation_level="variant"
    )


def open_food101(root: Path, split: str) -> ImageFiles:
    """List the images of a split of Food-101, class by class."""
    folder = root / "food-101"
    listing = folder / "meta" / f"{split}.json"
    image_set = _open_listed("Food101", root, folder / "images", listing, entry="image", split=split)
    # torchvision numbers the classes of each list separately: a class that one list lacks would shift all later ones.
    names_file = folder / "meta" / "classes.txt"
    class_names = names_file.read_text(encoding="utf-8", errors="replace").split()
    if different := sorted(set(class_names).symmetric_difference(image_set.class_names)):
        raise ValueError(
            f"{listing} has {len(image_set.class_names)} classes and {names_file} has {len(class_names)}, different in "
            f"{different[0]!r}; replace both with the original files"
        )
    return image_set


def torchvision_class(name: str) -> Any:
    """Return a class of torchvision.datasets, imported only when a set is opened: the import takes seconds."""
    import gpipe._compat.torchvision  # noqa: F401  (before torchvision)

    # isort: split
    from torchvision import datasets

    return getattr(datasets, name)


def check_unpacked_size(path: Path) -> None:
    """Refuse a MATLAB file that unpacks to more than 64 MiB, before scipy unpacks it.

    Source of the format: MathWorks, "MAT-File Format", chapter 1, versions 5 to 7: a header, then elements that begin
    with their type and number of bytes.

    Raises:
        ValueError: the file unpacks to more, or cannot be unpacked.
    """
    content = path.read_bytes()
    order = "<" if content[126:128] == b"IM" else ">"
    start, unpacked = _MATLAB_HEADER_BYTES, 0
    while start + 8 <= len(content):
        kind, num_bytes = struct.unpack_from(f"{order}2I", content, start)
        start += 8
        if kind == _COMPRESSED:
            packed = content[start : start + num_bytes]
            try:
                unpacked += len(zlib.decompressobj().decompress(packed, _MAX_UNPACKED_BYTES + 1))
            except zlib.error as error:
                raise ValueError(f"cannot read {path}: {error}; replace it with the original file") from error
        if unpacked > _MAX_UNPACKED_BYTES:
            raise ValueError(f"{path} unpacks to more than 64 MiB; replace it with the original file")
        start += num_bytes


def _open_listed(
    class_name: str, root: Path, folder: Path, listing: Path, *, entry: str = "line", **options: str
) -> ImageFiles:
    """Read a list with a class of torchvision.datasets and its options, and return its images in `folder`.

    A message calls an element of the list an `entry`.
    """
    from gpipe._compat.torchvision import list_files  # it loads torchvision

    read = torchvision_class(class_name)
    try:
        data_set = read(root, download=False, **options)
    except Exception as error:  # its parsers raise whatever fails first
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot read {listing}: {cause}; replace it with the original file") from error
    paths, labels = list_files(data_set)
    names = [path.as_posix().removeprefix(f"{folder.as_posix()}/") for path in paths]
    num_classes = len(data_set.classes)
    if len(names) == 0:
        raise ValueError(f"{listing} lists no images; replace it with the original file")
    for number, (name, label) in enumerate(zip(names, labels, strict=True), start=1):
        check_name(name, folder, f"{listing}, {entry} {number}")
        if not 0 <= label < num_classes:
            raise ValueError(
                f"{listing}, {entry} {number}: the class {label + 1} is not one of 1 to {num_classes}; "
                "replace the file with the original one"
            )
    missing = np.flatnonzero(~are_files(folder, names))
    if len(missing):
        raise ValueError(
            f"{len(missing):,} of the {len(names):,} images in {listing} are not in {folder}, the first is "
            f"{names[missing[0]]}; unpack the set's archive again"
        )
    return ImageFiles(folder, names, labels, data_set.classes)
