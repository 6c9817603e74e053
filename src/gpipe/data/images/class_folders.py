"""Image files that lie in a folder per class, links to elsewhere included."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn


def list_class_folders(
    folder: Path, class_names: Sequence[str], endings: tuple[str, ...]
) -> tuple[list[str], list[int]]:
    """Return the paths of all files with one of the endings, relative to folder, [n], and their classes, [n].

    folder: has a folder per class. They come in the order of the classes, then of the folders in them, then of the
    names. Raises ValueError for a folder that cannot be listed and for one that a link leads to again;
    FileNotFoundError for a class without images.
    """
    places = {os.path.realpath(folder): str(folder)}
    names: list[str] = []
    labels: list[int] = []
    for label, class_name in enumerate(class_names):
        found = [
            f"{place}/{file}"
            for place, files in sorted(_walk(folder, class_name, places))
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


def _walk(folder: Path, class_name: str, places: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the folders of a class, relative to folder, and their files.

    places: every folder that any walk has seen, by its true path.
    """
    for place, _, files in os.walk(folder / class_name, onerror=_refuse_unreadable, followlinks=True):
        true_path = os.path.realpath(place)
        if true_path in places:
            raise ValueError(
                f"{place} leads to {places[true_path]} again, whose images would count more than once; remove the link"
            )
        places[true_path] = place
        yield os.path.relpath(place, folder), files


def _refuse_unreadable(error: OSError) -> NoReturn:
    raise ValueError(f"cannot list {error.filename}: {error.strerror}; make it readable, or remove it") from error
