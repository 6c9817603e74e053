"""The reader of Birdsnap (Berg et al. 2014): photographs of North American birds, 500 species.

Its archive holds a program that downloads the images, and tab-separated lists that begin with a line of field names.
Source of the layout: readme.txt of the archive birdsnap.tgz, version 1.1, in the public repository
jonathantcallahan/birdboy.
"""

from pathlib import Path
from typing import NamedTuple

from gpipe.data.images.image_set import ImageFiles, are_files, check_name


class _Row(NamedTuple):
    entry: str  # file and line, for messages
    fields: list[str]


def open_birdsnap(root: Path, split: str) -> ImageFiles:
    """List the images of a split in the order of images.txt: those of test_images.txt, or all others.

    Images that could not be downloaded are left out: some addresses are dead.

    Raises:
        ValueError: a list is damaged (the message names file and line), or there is no image.
    """
    folder = root / "birdsnap"
    images = folder / "download" / "images"
    class_names, classes = _read_species(folder / "species.txt")
    labels = _read_labels(folder / "images.txt", images, classes)
    test_names = _read_test_names(folder / "test_images.txt", labels)
    names = [name for name in labels if (name in test_names) == (split == "test")]
    there = [name for name, is_there in zip(names, are_files(images, names), strict=True) if is_there]
    if not there:
        raise ValueError(f"{images} has none of the {len(names):,} {split} images; run get_birdsnap.py in {folder}")
    return ImageFiles(images, there, [labels[name] for name in there], class_names)


def _read_species(path: Path) -> tuple[list[str], dict[str, int]]:
    """Return the common names of the species, and the class of each species id."""
    rows = _read_rows(path, ("id", "common"))
    return [row.fields[1] for row in rows], {row.fields[0]: position for position, row in enumerate(rows)}


def _read_labels(path: Path, images: Path, classes: dict[str, int]) -> dict[str, int]:
    """Return the class of each image, by its path below `images`."""
    labels = {}
    for entry, (name, species) in _read_rows(path, ("path", "species_id")):
        check_name(name, images, entry)
        if species not in classes:
            raise ValueError(f"{entry}: species.txt has no species {species!r}; replace both with the original files")
        labels[name] = classes[species]
    return labels


def _read_test_names(path: Path, labels: dict[str, int]) -> set[str]:
    names = set()
    for entry, (name,) in _read_rows(path, ("path",)):
        if name not in labels:
            raise ValueError(f"{entry}: images.txt has no image {name!r}; replace both with the original files")
        names.add(name)
    return names


def _read_rows(path: Path, wanted: tuple[str, ...]) -> list[_Row]:
    """Read some columns of a tab-separated file; its first line names all columns."""
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").removesuffix("\n").split("\n")
    header = lines[0].split("\t")
    if missing := [name for name in wanted if name not in header]:
        raise ValueError(
            f"{path}, line 1: the field {missing[0]!r} is missing in {header}; replace the file with the original one"
        )
    columns = [header.index(name) for name in wanted]
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        fields = line.split("\t")
        if len(fields) <= max(columns):
            raise ValueError(
                f"{path}, line {number}: {len(fields)} fields, expected the {len(header)} of the first line; "
                "replace the file with the original one"
            )
        rows.append(_Row(f"{path}, line {number}", [fields[column] for column in columns]))
    return rows
