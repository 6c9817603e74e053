"""The reader of ImageNet-2012: image files in one folder per class, as most tools expect them."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from gpipe.data.images.image_set import ImageFiles

_FOLDERS = {"train": "train", "test": "val"}


def count_class_folders(root: Path) -> int:
    """Return the number of folders in root/train."""
    with os.scandir(root / "train") as entries:
        return sum(entry.is_dir() for entry in entries)


def open_class_folders(root: Path, split: str) -> ImageFiles:
    """List the images of a split in the order of their paths; the "test" split is root/val.

    The classes are the folders of root/train, sorted. Links are followed.

    Raises:
        ValueError: root/val has other classes, a folder cannot be listed, or a link leads to a folder that was listed.
        FileNotFoundError: a class has no image.
    """
    import gpipe._compat.torchvision  # noqa: F401  (before torchvision)

    # isort: split
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes

    class_names, _ = find_classes(root / "train")
    val_classes = set(find_classes(root / "val")[0])
    if different := sorted(val_classes.symmetric_difference(class_names)):
        raise ValueError(
            f"{root / 'train'} has {len(class_names)} class folders and {root / 'val'} has {len(val_classes)}, "
            f"different in {different[0]!r}; sort the val images into folders with the names of the training classes"
        )
    folder = root / _FOLDERS[split]
    names, labels = _list_images(folder, class_names, IMG_EXTENSIONS)
    return ImageFiles(folder, names, labels, class_names)


def _list_images(folder: Path, class_names: Sequence[str], endings: tuple[str, ...]) -> tuple[list[str], list[int]]:
    """Return the paths below `folder` of all files with one of the endings, and their classes.

    They are sorted by class, folder and name.
    """
    visited = {os.path.realpath(folder): str(folder)}
    names: list[str] = []
    labels: list[int] = []
    for label, class_name in enumerate(class_names):
        found = [
            f"{place}/{file}"
            for place, files in sorted(_walk(folder, class_name, visited))
            for file in sorted(files)
            if file.lower().endswith(endings)
        ]
        if not found:
            raise FileNotFoundError(
                f"{folder / class_name} has no image, expected files that end with {', '.join(endings)}; unpack the "
                "set's archive again, or remove the folder"
            )
        names += found
        labels += [label] * len(found)
    return names, labels


def _walk(folder: Path, class_name: str, visited: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder of a class, relative to `folder`, with its files; `visited` maps true paths to folders."""
    for place, _, files in os.walk(folder / class_name, onerror=_refuse_unreadable, followlinks=True):
        true_path = os.path.realpath(place)
        if true_path in visited:
            raise ValueError(
                f"{place} leads to {visited[true_path]} again, whose images would count more than once; remove the link"
            )
        visited[true_path] = place
        yield os.path.relpath(place, folder), files


def _refuse_unreadable(error: OSError) -> NoReturn:
    raise ValueError(f"cannot list {error.filename}: {error.strerror}; make it readable, or remove it") from error
