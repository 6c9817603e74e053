"""The reader of image files in one folder per class, as most tools expect: ImageNet-2012, and the user's own images."""

import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

from gpipe.data.images.image_set import IMAGE_SUFFIXES, ImageFiles, is_class_name, is_hidden, is_image
from gpipe.data.location import find_training_folder, refuse_two_sources

_FOLDERS = {"train": "train", "test": "val"}


def count_class_folders(root: Path) -> int:
    """Return the number of folders in root/train or, without root/train, in root."""
    return len(_list_classes(find_training_folder(root)))


def _list_classes(folder: Path) -> list[str]:
    """Return the sorted names of a folder's subfolders that are not hidden."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not is_hidden(entry.name))


def check_own_folders(root: Path, share: float | None) -> None:
    """Refuse a user's folder without two or more well-named classes, or without evaluation images from one source."""
    if (root / "val").is_dir():
        refuse_two_sources(share, root / "val", "has images")
    if share is None and not all((root / name).is_dir() for name in ("train", "val")):
        raise ValueError(
            f"data.root is {root}, which has no train/<class> and val/<class>: sort your images into these, or set "
            "data.validation_share=0.1 to evaluate on a tenth of each class."
        )
    folder = find_training_folder(root)
    names = _list_classes(folder)
    if len(names) < 2:
        raise ValueError(
            f"data.root is {root}, which has {len(names)} class folders in {folder}, expected 2 or more: sort your "
            "images into one folder per class."
        )
    for name in names:
        if not is_class_name(name):
            raise ValueError(
                f"{str(folder / name)!a} has a name that is not one line of UTF-8 without control characters, and runs "
                "store the names of classes: rename it."
            )
    if share is None:
        _find_classes(root)


def _find_classes(root: Path) -> list[str]:
    """Return the names of the folders of root/train, which must be those of root/val."""
    names, val_names = (_list_classes(root / name) for name in ("train", "val"))
    if different := sorted(set(val_names).symmetric_difference(names)):
        raise ValueError(
            f"{root / 'train'} has {len(names)} class folders and {root / 'val'} has {len(val_names)}, "
            f"different in {different[0]!r}; sort the val images into folders with the names of the training classes"
        )
    return names


def open_own_folders(root: Path, split: str, share: float | None) -> ImageFiles:
    """List the images of a split, in the order of their paths.

    Args:
        root: has train/<class> and val/<class>; or, with a share, train/<class> or <class>.
        split: "train" or "test".
        share: the share of each class's images for evaluation; None if root/val has them. Images are drawn by their
            names, so adding images moves hardly any others.
    """
    if share is None:
        return open_class_folders(root, split)
    folder = find_training_folder(root)
    return _open(folder, _list_classes(folder), split, share)


def take_share(images: Sequence[str], class_name: str, split: str, share: float) -> list[str]:
    """Return the images of one class that belong to a split; each split has at least one."""
    if len(set(images)) < 2:
        count = "one image" if images else "no image that is not listed under another class first"
        raise ValueError(
            f"the class {class_name} has {count}, expected 2 or more to divide between the splits; add another"
        )
    drawn = draw_share(images, share)
    return [image for image in images if (image in drawn) == (split == "test")]


def draw_share(images: Sequence[str], share: float) -> set[str]:
    """Return which of 2 or more images are for evaluation: this share of them, at least one, and not all.

    They are drawn by their names. An image that is listed twice counts once, and adding an image moves at most one
    other between the splits.
    """
    ordered = sorted(set(images), key=lambda name: sha256(name.encode(errors="surrogateescape")).digest())
    return set(ordered[: min(max(1, round(share * len(ordered))), len(ordered) - 1)])


def open_class_folders(root: Path, split: str) -> ImageFiles:
    """List the images of a split in the order of their paths; the "test" split is root/val.

    The classes are the folders of root/train, sorted. Links are followed.
    """
    return _open(root / _FOLDERS[split], _find_classes(root), split, None)


def _open(folder: Path, class_names: Sequence[str], split: str, share: float | None) -> ImageFiles:
    """List the images in a folder of each class, sorted by class, folder and name; leave out hidden files.

    With a share, only those of the split; None takes all.
    """
    visited = {os.path.realpath(folder): str(folder)}
    names: list[str] = []
    labels: list[int] = []
    left_out: list[str] = []
    for label, class_name in enumerate(class_names):
        files = [
            (f"{place}/{file}", is_image(file))
            for place, files in sorted(walk(folder, class_name, visited))
            for file in sorted(files)
            if not is_hidden(file)
        ]
        found = [path for path, counts in files if counts]
        if not found:
            raise FileNotFoundError(
                f"{folder / class_name} has no image, expected files that end with {', '.join(IMAGE_SUFFIXES)}; unpack "
                "the set's archive again, or remove the folder"
            )
        kept = found if share is None else take_share(found, class_name, split, share)
        names += kept
        labels += [label] * len(kept)
        left_out += [path for path, counts in files if not counts]
    return ImageFiles(folder, names, labels, class_names, left_out)


def walk(folder: Path, name: str, visited: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield folder/name and each folder in it, relative to `folder`, with its files; follow links.

    Hidden folders are skipped: they have copies of files, which could be in both splits.

    Args:
        folder: what the yielded paths are relative to.
        name: of a folder in it.
        visited: maps true paths to folders that were listed, and gets these.

    Raises:
        ValueError: a folder cannot be listed, or a link leads to one that was listed.
    """
    for place, folders, files in os.walk(folder / name, onerror=_refuse_unreadable, followlinks=True):
        folders[:] = [name for name in folders if not is_hidden(name)]  # os.walk enters those that stay
        true_path = os.path.realpath(place)
        if true_path in visited:
            raise ValueError(
                f"{place} leads to {visited[true_path]} again, whose files would count more than once; remove the link"
            )
        visited[true_path] = place
        yield os.path.relpath(place, folder), files


def _refuse_unreadable(error: OSError) -> NoReturn:
    raise ValueError(f"cannot list {error.filename}: {error.strerror}; make it readable, or remove it") from error
