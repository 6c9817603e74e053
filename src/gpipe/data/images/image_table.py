"""The reader of the user's own images listed in a table, CSV or Parquet, with one or several labels each."""

import csv
import math
import os
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpipe.data.images.class_folders import draw_share, take_share
from gpipe.data.images.image_set import ImageFiles, are_files, is_class_name
from gpipe.data.location import refuse_two_sources

_SUFFIXES = (".csv", ".parquet")
_TABLES = {"train": "train", "test": "val"}
SEPARATOR = "|"
"""Separates an image's labels in the column `labels` of a CSV."""


class Table(NamedTuple):
    """The contents of a table."""

    path: Path
    names: list[str]  # the images' paths
    labels: list[tuple[str, ...]]  # of each image, one or several
    has_several: bool  # whether the column is called `labels`
    classes: list[str]  # all labels, sorted


def check_own_table(root: Path, share: float | None) -> None:
    """Refuse tables without two or more classes or evaluation images from one source, or that do not match."""
    table, val = read_table(root, "train"), _find_table(root, "val")
    if val is not None:
        refuse_two_sources(share, val, "lists images")
    other = table if share is not None else read_table(root, "test")
    if len(table.classes) < 2:
        raise ValueError(f"{table.path} has the labels {table.classes}, expected 2 or more different ones: add images.")
    if other.has_several != table.has_several:
        raise ValueError(
            f"{table.path} and {other.path} have columns of different names: call both columns label, or labels."
        )
    if unknown := sorted(set(other.classes) - set(table.classes)):
        raise ValueError(
            f"{other.path} has the label {unknown[0]!r}, which no image of {table.path} has: correct it, or add "
            "training images with it."
        )


def open_own_table(root: Path, split: str, share: float | None) -> ImageFiles:
    """List the images of a split, in the order of their table.

    Args:
        root: has train.csv or train.parquet, and one such table called val, unless there is a share. Paths in the
            tables are relative to it, or absolute.
        split: "train" or "test".
        share: the share of each class's images for evaluation, or of all images if they have several labels each; None
            if root has a table for that. All rows of an image are in one split, however they spell its path.
    """
    train = read_table(root, "train")
    table = train if share is not None else read_table(root, split)
    missing = np.flatnonzero(~are_files(root, table.names))
    if len(missing):
        raise FileNotFoundError(
            f"{root / table.names[missing[0]]} does not exist, one of {len(missing)} missing files that {table.path} "
            "lists: correct the table, or set data.root to the folder that its paths are relative to."
        )
    number = {name: label for label, name in enumerate(train.classes)}
    rows = list(range(len(table.names)))
    labels: NDArray[np.int64] | NDArray[np.bool_]
    if table.has_several:
        labels = np.zeros((len(rows), len(train.classes)), dtype=np.bool_)
        for row, names in enumerate(table.labels):
            labels[row, [number[name] for name in names]] = True
    else:
        labels = np.array([number[name] for (name,) in table.labels], dtype=np.int64)
    if share is not None:
        drawn = _draw_rows(root, table, share)
        rows = [row for row in rows if (row in drawn) == (split == "test")]
    return ImageFiles(root, [table.names[row] for row in rows], labels[rows], train.classes)


def _draw_rows(root: Path, table: Table, share: float) -> set[int]:
    """Return the rows for evaluation: all rows of the drawn images, which are drawn by the names in their first rows.

    If images have one label each, a share of each class is drawn; an image's class is its first row's.
    """
    images = [os.path.normpath(root / name) for name in table.names]
    first: dict[str, int] = {}
    for row, image in enumerate(images):
        first.setdefault(image, row)
    if table.has_several:
        drawn = draw_share([table.names[row] for row in first.values()], share)
    else:
        of_class: dict[str, list[str]] = {label: [] for label in table.classes}
        for row in first.values():
            of_class[table.labels[row][0]].append(table.names[row])
        drawn = {name for label, own in of_class.items() for name in take_share(own, label, "test", share)}
    return {row for row, image in enumerate(images) if table.names[first[image]] in drawn}


def _find_table(root: Path, name: str) -> Path | None:
    found = [path for suffix in _SUFFIXES if (path := root / f"{name}{suffix}").is_file()]
    if len(found) > 1:
        raise ValueError(f"data.root is {root}, which has both {found[0].name} and {found[1].name}: remove one.")
    return found[0] if found else None


def read_table(root: Path, split: str) -> Table:
    """Read the table of a split."""
    name = _TABLES[split]
    path = _find_table(root, name)
    if path is None:
        share = ", or set data.validation_share=0.1 to evaluate on a tenth of the images" if split == "test" else ""
        raise ValueError(f"data.root is {root}, which has no {name}.csv or {name}.parquet: add one{share}.")
    return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=2)  # a run counts the classes, and opens both splits
def _read(path: Path, _changed: int) -> Table:
    columns = _read_csv(path) if path.suffix == ".csv" else _read_parquet(path)
    own = [name for name in ("label", "labels") if name in columns]
    if "path" not in columns or len(own) != 1:
        raise ValueError(
            f"{path} has the columns {', '.join(columns) or 'none'}, expected path and either label (one per image) or "
            "labels (several): rename them."
        )
    column, has_several = own[0], own == ["labels"]
    names: list[str] = []
    labels: list[tuple[str, ...]] = []
    for row, (name, value) in enumerate(zip(columns["path"], columns[column], strict=True), start=1):
        fits = isinstance(value, str | list) if has_several else not isinstance(value, list | dict | bytes)
        if not (fits or _is_missing(value)):
            expected, other = (
                (f"a list, or words separated by {SEPARATOR}", "label if each image has one")
                if has_several
                else ("one word or number", "labels if an image has a list of them")
            )
            raise ValueError(
                f"{path}, image {row}, has the {column} {value!r}, expected {expected}: correct it, or call the column "
                f"{other}."
            )
        names.append("" if _is_missing(name) else str(name))
        labels.append(_split(value, has_several))
        if not names[-1] or not (labels[-1] or has_several):
            raise ValueError(
                f"{path}, image {row}, has the path {names[-1]!r} and the labels {list(labels[-1])}: give it both."
            )
        if wrong := [label for label in labels[-1] if not is_class_name(label)]:
            raise ValueError(
                f"{path}, image {row}, has the label {wrong[0]!a}, expected one line without control characters, "
                "because runs store one line per class: rename it."
            )
    return Table(path, names, labels, has_several, sorted(set(chain.from_iterable(labels))))


def _split(value: Any, has_several: bool) -> tuple[str, ...]:
    if _is_missing(value):
        return ()
    if not has_several:
        return (str(value),)
    parts: Sequence[Any] = value.split(SEPARATOR) if isinstance(value, str) else value
    return tuple(dict.fromkeys(str(part).strip() for part in parts if not _is_missing(part) and str(part).strip()))


def _is_missing(value: Any) -> bool:
    """Return whether a value is empty, null, or NaN, which some programs write for null."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _read_csv(path: Path) -> dict[str, list[Any]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, strict=True)
            rows = filter(None, reader)  # without blank lines
            columns: dict[str, list[Any]] = {name.strip(): [] for name in next(rows, [])}
            for row in rows:
                if len(row) != len(columns):
                    raise ValueError(f"line {reader.line_num} has {len(row)} values for {len(columns)} columns")
                for name, value in zip(columns, row, strict=True):
                    columns[name].append(value.strip())
    except (ValueError, csv.Error) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(f"{path} is not a table ({error}): write it as CSV in UTF-8, with commas.") from None
    return columns


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    if find_spec("pyarrow") is None:
        raise ValueError(f"{path} needs the Python package pyarrow: run pip install pyarrow, or write it as CSV.")
    import pyarrow
    from pyarrow import parquet

    try:
        known = [name for name in parquet.read_schema(path).names if name in ("path", "label", "labels")]
        columns: dict[str, list[Any]] = parquet.read_table(path, columns=known).to_pydict()
    except (OSError, pyarrow.ArrowException) as error:
        first = str(error).partition("\n")[0]
        raise ValueError(f"{path} is not a Parquet table ({first}): write it again.") from None
    return columns
