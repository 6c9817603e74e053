"""Lists of image files that come with an image set, checked against what is on the disk."""

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from gpipe.data.images.image_set import ImageFiles


def open_listed_images(
    listing: Path,
    folder: Path,
    names: Sequence[str],
    labels: Sequence[int],
    class_names: Sequence[str],
    *,
    entry: str = "line",
) -> ImageFiles:
    """Open the images that a list names, decoding nothing.

    listing: the list, for messages. folder: where the images lie. names: their paths relative to folder, [n];
    labels: [n]. entry: what one of the list's places is called. Raises ValueError, which names the list, where it is
    empty, an entry has an impossible label, leaves the folder, or names no file.
    """
    if len(names) == 0:
        raise ValueError(f"{listing} lists no images; replace it with the original file")
    for number, (name, label) in enumerate(zip(names, labels, strict=True), start=1):
        check_name(name, folder, f"{listing}, {entry} {number}")
        if not 0 <= label < len(class_names):
            raise ValueError(
                f"{listing}, {entry} {number}: the class {label + 1} is not one of 1 to {len(class_names)}; "
                "replace the file with the original one"
            )
    missing = np.flatnonzero(~are_files(folder, names))
    if len(missing):
        raise ValueError(
            f"{len(missing):,} of the {len(names):,} images in {listing} are not in {folder}, "
            f"the first is {names[missing[0]]}; unpack the set's archive again"
        )
    return ImageFiles(folder, names, labels, class_names)


def check_lines(listing: Path, pattern: str, form: str) -> None:
    """Refuse a list with a line that the regular expression does not match as a whole.

    form: what a line must be, for people. Raises ValueError, which names the list and the line.
    """
    with listing.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not re.fullmatch(pattern, line.strip()):
                raise ValueError(
                    f"{listing}, line {number}: {line.strip()!r} is not {form}; replace the file with the original one"
                )


def check_name(name: str, folder: Path, place: str) -> None:
    """Refuse a name in a list that would lead out of the folder of the images.

    place: which entry of which list it is. Raises ValueError.
    """
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{place}: {name!r} is not a path below {folder}; replace the file with the original one")


def are_files(folder: Path, names: Sequence[str]) -> NDArray[np.bool_]:
    """Say of each name whether it is there, with one look at each folder instead of one at each of 100,000 files."""
    split_names = [name.rpartition("/") for name in names]
    present = {parent: _entries(folder / parent) for parent in {parent for parent, _, _ in split_names}}
    return np.array([last in present[parent] for parent, _, last in split_names], dtype=bool)


def _entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
