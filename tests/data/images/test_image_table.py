"""Images that a CSV or Parquet table lists: what is read, shared out, and refused."""

import csv
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from gpipe.data import (
    BrokenImage,
    DataMissing,
    ImageLoader,
    check_image_set,
    count_classes,
    evaluation_transform,
    open_image_set,
    tell_several_labels,
)

ONE = [("a/0.png", "cat"), ("a/1.png", "dog"), ("2.png", "cat"), ("3.png", "dog")]
SEVERAL = [("a/0.png", ["dog", "cat"]), ("a/1.png", []), ("2.png", ["cow"]), ("3.png", ["cat", "dog"])]


def write_images(root: Path) -> None:
    (root / "a").mkdir()
    for number, (name, _) in enumerate(ONE):
        Image.new("L", (8 + number, 8)).save(root / name)


def write_csv(path: Path, header: tuple[str, str], rows: Any) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerow(header)
        csv.writer(stream).writerows(rows)


def write_parquet(path: Path, header: tuple[str, str], rows: Any) -> None:
    parquet.write_table(pyarrow.table(dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))), path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_images(tmp_path)
    return tmp_path


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_a_column_of_one_label(root: Path, write: Any) -> None:
    suffix = write.__name__.removeprefix("write_")
    write(root / f"train.{suffix}", ("path", "label"), ONE)
    write(root / f"val.{suffix}", ("path", "label"), [(str(root / "3.png"), "dog")])
    assert (count_classes("image_table", root), tell_several_labels("image_table", root)) == (2, False)
    train, test = (open_image_set("image_table", split, root) for split in ("train", "test"))
    assert train.class_names == test.class_names == ["cat", "dog"]
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 1, 0, 1], [1])
    assert [train.image(index).size[0] for index in range(4)] == [8, 9, 10, 11] and test.image(0).size[0] == 11


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_a_column_of_several_labels(root: Path, write: Any) -> None:
    suffix = write.__name__.removeprefix("write_")
    rows = SEVERAL if suffix == "parquet" else [(name, " | ".join(labels)) for name, labels in SEVERAL]
    write(root / f"train.{suffix}", ("path", "labels"), rows)
    assert tell_several_labels("image_table", root)
    train, test = (open_image_set("image_table", split, root, 0.25) for split in ("train", "test"))
    assert train.class_names == ["cat", "cow", "dog"]
    expected = {8: [1, 0, 1], 9: [0, 0, 0], 10: [0, 1, 0], 11: [1, 0, 1]}
    assert (len(train), len(test)) == (3, 1)
    found = {images.image(i).size[0]: images.labels[i].tolist() for images in (train, test) for i in range(len(images))}
    assert found == expected


def test_mini_batches_have_a_number_for_each_class_and_a_broken_image_is_replaced_by_one_of_the_same_labels(
    root: Path,
) -> None:
    write_csv(root / "train.csv", ("path", "labels"), [(name, "|".join(labels)) for name, labels in SEVERAL])
    write_csv(root / "val.csv", ("path", "labels"), [("2.png", "cow")])
    (root / "a/0.png").write_bytes(b"no image")
    transform = evaluation_transform(4, channels=1, center_crop=1.0)
    loader = ImageLoader(
        open_image_set("image_table", "train", root), 4, transform, 0, shuffle=False, num_workers=0, max_broken_images=1
    )
    ((images, targets),) = loader
    assert images is not None and images.shape == (4, 1, 4, 4)
    assert targets.tolist() == [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    (root / "2.png").write_bytes(b"no image")
    loader = ImageLoader(
        open_image_set("image_table", "train", root), 4, transform, 0, shuffle=False, num_workers=0, max_broken_images=2
    )
    with pytest.raises(BrokenImage, match="no image of its class is left"):
        list(loader)


@settings(max_examples=30, deadline=None)
@given(counts=st.lists(st.integers(2, 40), min_size=2, max_size=5), share=st.floats(0.01, 0.99), data=st.data())
def test_each_class_is_shared_out(tmp_path_factory: Any, counts: list[int], share: float, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("table")
    names = [str(label) for label, count in enumerate(counts) for _ in range(count)]
    order = data.draw(st.permutations(range(len(names))))
    for number in order:
        (root / f"{number}.png").touch()
    write_csv(root / "train.csv", ("path", "label"), [(f"{number}.png", names[number]) for number in order])
    train, test = (open_image_set("image_table", split, root, share) for split in ("train", "test"))
    assert len(train) + len(test) == len(names)
    for label, count in enumerate(counts):
        own = int((test.labels == label).sum())
        assert own == min(max(1, round(share * count)), count - 1)
        assert own + int((train.labels == label).sum()) == count
    assert not {test.path(i) for i in range(len(test))} & {train.path(i) for i in range(len(train))}  # type: ignore[attr-defined]


@pytest.mark.parametrize("header", [("path", "label"), ("path", "labels")], ids=" ".join)
def test_an_image_that_is_listed_twice_is_in_one_split(tmp_path: Path, header: tuple[str, str]) -> None:
    rows = [(f"{number}.png", str(number % 2)) for number in range(40)]
    for name, _ in rows:
        (tmp_path / name).touch()
    write_csv(tmp_path / "train.csv", header, [*rows, *rows])
    train, test = (open_image_set("image_table", split, tmp_path, 0.25) for split in ("train", "test"))
    assert (len(train), len(test)) == (60, 20)
    assert not {test.path(i) for i in range(len(test))} & {train.path(i) for i in range(len(train))}  # type: ignore[attr-defined]


def paths(images: Any) -> set[str]:
    return {os.path.normpath(images.path(index)) for index in range(len(images))}


@pytest.mark.parametrize("header", [("path", "label"), ("path", "labels")], ids=" ".join)
def test_an_image_under_several_labels_or_spellings_is_in_one_split(tmp_path: Path, header: tuple[str, str]) -> None:
    rows = [(f"{number}.png", str(number % 2)) for number in range(40)]
    for name, _ in rows:
        (tmp_path / name).touch()
    other_label = [(name, str(1 - int(label))) for name, label in rows[:20]]
    other_spelling = [(f"./{name}", label) for name, label in rows[10:30]]
    absolute = [(str(tmp_path / "a" / ".." / name), label) for name, label in rows[20:]]
    write_csv(tmp_path / "train.csv", header, rows)
    alone = [open_image_set("image_table", split, tmp_path, 0.25) for split in ("train", "test")]
    write_csv(tmp_path / "train.csv", header, [*rows, *other_label, *other_spelling, *absolute])
    (tmp_path / "a").mkdir()
    found = [open_image_set("image_table", split, tmp_path, 0.25) for split in ("train", "test")]
    assert sum(map(len, found)) == 100
    for before, after in zip(alone, found, strict=True):
        assert paths(before) == paths(after)
    assert not paths(found[0]) & paths(found[1])


def test_a_class_whose_images_are_all_of_other_classes_first_is_refused(root: Path) -> None:
    write_csv(root / "train.csv", ("path", "label"), [*ONE, ("2.png", "cow")])
    with pytest.raises(ValueError, match=r"class cow has no image that is not listed under another class first, "):
        open_image_set("image_table", "train", root, 0.5)


GOOD = "path,label\n3.png,a\n2.png,b\n"
# What a folder has in place of a good table, the share for evaluation, and what is said.
BAD: dict[str, tuple[dict[str, str | bytes], float | None, str]] = {
    "other columns": ({"train.csv": "file,label\n3.png,a\n"}, None, r"has the columns file, label, expected"),
    "both columns": ({"train.csv": "path,label,labels\n3.png,a,b\n"}, None, r"expected path and either label"),
    "no val": ({"train.csv": GOOD}, None, r"has no val.csv or val.parquet: add"),
    "val and a share": ({"train.csv": GOOD, "val.csv": GOOD}, 0.5, r"validation_share is 0.5, but .*val.csv lists"),
    "one class": ({"train.csv": "path,label\n3.png,a\n2.png,a\n"}, 0.5, r"has the labels \['a'\], expected 2"),
    "an unknown label": (
        {"train.csv": GOOD, "val.csv": "path,label\n3.png,c\n"}, None, r"has the label 'c', which no image of .*train",
    ),
    "kinds of labels": (
        {"train.csv": GOOD, "val.csv": "path,labels\n3.png,a\n"}, None, r"columns of different names",
    ),
    "a missing label": ({"train.csv": "path,label\n3.png,a\n2.png,\n"}, 0.5, r"image 2, has the path '2.png'"),
    "a label of two lines": (
        {"train.csv": 'path,label\n3.png,a\n2.png,"b\nc"\n'}, 0.5, r"image 2, has the label 'b\\nc', expected one line",
    ),
    "a missing value": ({"train.csv": "path,label\n3.png\n"}, 0.5, r"line 2 has 1 values for 2 columns"),
    "a missing value behind lines of other rows": (
        {"train.csv": '\n\npath,label\n"3\n.png",a\n\n2.png\n'}, 0.5, r"line 7 has 1 values for 2 columns",
    ),
    "missing images": ({"train.csv": GOOD + "9.png,b\n5.png,a\n"}, 0.5, r"9.png does not exist, one of 2 missing"),
    "one image of a class": ({"train.csv": GOOD}, 0.5, r"the class a has one image"),
    "two tables": ({"train.csv": GOOD, "train.parquet": ""}, 0.5, r"has both train.csv and train.parquet: remove one"),
    "no parquet": ({"train.parquet": "no table at all"}, 0.5, r"is not a Parquet table"),
    "no text": ({"train.csv": b"path,label\n3.png,\xff\n"}, 0.5, r"is not a table \('utf-8' codec"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_table_that_does_not_fit_is_refused_in_a_sentence(root: Path, case: str) -> None:
    files, share, said = BAD[case]
    for name, text in files.items():
        (root / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises((ValueError, FileNotFoundError), match=said) as error:
        open_image_set("image_table", "train", root, share)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_table_is_said_with_what_is_expected(root: Path) -> None:
    with pytest.raises(DataMissing, match=r"train\.csv    or \.parquet"):
        check_image_set("image_table", root)


def test_blank_lines_are_skipped(root: Path) -> None:
    (root / "train.csv").write_text("\n\n" + GOOD.replace("\n", "\n\n"))
    assert count_classes("image_table", root) == 2


def test_labels_of_one_kind_stay_numbers(root: Path) -> None:
    write_csv(root / "train.csv", ("path", "label"), ONE)
    assert open_image_set("image_table", "train", root, 0.5).labels.dtype == np.int64


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            {"path": ["2.png", "3.png"], "labels": [1, 2]},
            r"image 1, has the labels 1, expected a list, or words separated by \|: ",
        ),
        ({"path": ["2.png", "3.png"], "labels": [None, 0.5]}, r"image 2, has the labels 0\.5, expected a list"),
        (
            {"path": ["2.png", "3.png"], "label": [1.0, math.nan]},
            r"image 2, has the path '3.png' and the labels \[\]: ",
        ),
        ({"path": ["2.png", "3.png"], "label": ["a", None]}, r"image 2, has the path '3.png' and the labels \[\]: "),
        (
            {"path": ["2.png", "3.png"], "label": [["a"], ["b", "c"]]},
            r"image 1, has the label \['a'\], expected one word or number: ",
        ),
        ({"path": [None, "3.png"], "label": ["a", "b"]}, r"image 1, has the path '' and the labels \['a'\]: "),
        ({"path": [None, "3.png"], "labels": [["a"], ["b"]]}, r"image 1, has the path '' and the labels \['a'\]: "),
    ],
    ids=str,
)
def test_what_parquet_has_besides_words_is_refused_in_a_sentence(
    root: Path, columns: dict[str, Any], said: str
) -> None:
    parquet.write_table(pyarrow.table(columns), root / "train.parquet")
    with pytest.raises(ValueError, match=said) as error:
        open_image_set("image_table", "train", root, 0.5)
    assert "\n" not in str(error.value)


def test_a_null_among_several_labels_is_none(root: Path) -> None:
    columns = {"path": ["2.png", "3.png", "a/0.png"], "labels": [["a", None, "b"], None, ["a"]]}
    parquet.write_table(pyarrow.table(columns), root / "train.parquet")
    train, test = (open_image_set("image_table", split, root, 0.4) for split in ("train", "test"))
    assert train.class_names == ["a", "b"]
    assert sorted([*train.labels.tolist(), *test.labels.tolist()]) == [[False, False], [True, False], [True, True]]
