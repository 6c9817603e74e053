"""The reader of Birdsnap (Berg et al. 2014): photographs of North American birds, 500 species.

Its archive holds a program that downloads the images, and tab-separated lists that begin with a line of field names.
Source of the layout: readme.txt of the archive birdsnap.tgz, version 1.1, in the public repository
jonathantcallahan/birdboy.
"""

from collections.abc import Iterator
from pathlib import Path

from gpipe.data.images.image_set import ImageFiles, are_files, check_name


def open_birdsnap(root: Path, split: str) -> ImageFiles:
    """List the images of a split in the order of images.txt: those of test_images.txt, or all others.

    Images that could not be downloaded are left out: some addresses are dead.
    """
    folder = root / "birdsnap"
    images = folder / "download" / "images"
    species = [fields for _, fields in _read_rows(folder / "species.txt", "id", "common")]
    classes = {number: label for label, (number, _) in enumerate(species)}
    labels: dict[str, int] = {}  # by path below `images`
    for entry, (name, number) in _read_rows(folder / "images.txt", "path", "species_id"):
        check_name(name, images, entry)
        if number not in classes:
            raise ValueError(f"{entry}: species.txt has no species {number!r}; replace both with the original files")
        labels[name] = classes[number]
    test_names = set()
    for entry, (name,) in _read_rows(folder / "test_images.txt", "path"):
        if name not in labels:
            raise ValueError(f"{entry}: images.txt has no image {name!r}; replace both with the original files")
        test_names.add(name)
    names = [name for name in labels if (name in test_names) == (split == "test")]
    there = [name for name, is_there in zip(names, are_files(images, names), strict=True) if is_there]
    if not there:
        raise ValueError(f"{images} has none of the {len(names):,} {split} images; run get_birdsnap.py in {folder}")
    return ImageFiles(images, there, [labels[name] for name in there], [name for _, name in species])


def _read_rows(path: Path, *wanted: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the place and some columns of each row of a tab-separated file; its first line names all columns."""
    header, *lines = path.read_text(encoding="utf-8", errors="surrogateescape").removesuffix("\n").split("\n")
    names = header.split("\t")
    if missing := [name for name in wanted if name not in names]:
        raise ValueError(
            f"{path}, line 1: the field {missing[0]!r} is missing in {names}; replace the file with the original one"
        )
    for number, line in enumerate(lines, start=2):
        fields = dict(zip(names, line.split("\t"), strict=False))
        if not fields.keys() >= set(wanted):
            raise ValueError(
                f"{path}, line {number}: {len(fields)} fields, expected the {len(names)} of the first line; "
                "replace the file with the original one"
            )
        yield f"{path}, line {number}", [fields[name] for name in wanted]
