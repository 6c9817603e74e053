"""Birdsnap in a small folder of its real layout."""

from pathlib import Path

import pytest
from PIL import Image

from gpipe.data import ImageFiles, count_differences, open_image_set

SPECIES = (("1", "Acadian Flycatcher", "Acadian_Flycatcher"), ("2", "Anna's Hummingbird", "Annas_Hummingbird"))
# path, species id; the number in a path is also the image's width.
IMAGES = (
    ("Annas_Hummingbird/21.jpg", "2"),
    ("Acadian_Flycatcher/22.jpg", "1"),
    ("Acadian_Flycatcher/23.jpg", "1"),
    ("Annas_Hummingbird/24.jpg", "2"),
    ("Acadian_Flycatcher/25.jpg", "1"),
)
TEST_PATHS = ("Acadian_Flycatcher/25.jpg", "Annas_Hummingbird/21.jpg")
HEADER = ("url", "md5", "path", "species_id", "bb_x1", "bb_y1", "bb_x2", "bb_y2", "back_x", "back_y")


def write_table(path: Path, rows: list[tuple[str, ...]]) -> None:
    path.write_text("".join("\t".join(row) + "\n" for row in rows))


def image_row(path: str, species: str) -> tuple[str, ...]:
    """Return a line of images.txt; a part that is hidden has no coordinates."""
    return ("http://example.org/a b.jpg", "0" * 32, path, species, "1", "2", "3", "4", "", "")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "birdsnap"
    folder.mkdir()
    names = [("id", "common", "scientific", "dir"), *((key, name, "Avis", place) for key, name, place in SPECIES)]
    write_table(folder / "species.txt", names)
    write_table(folder / "images.txt", [HEADER, *(image_row(*image) for image in IMAGES)])
    write_table(folder / "test_images.txt", [("path",), *((path,) for path in TEST_PATHS)])
    for path, _ in IMAGES:
        target = folder / "download" / "images" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (int(target.stem), 10)).save(target)
    return tmp_path


def opened(split: str, root: Path) -> ImageFiles:
    image_set = open_image_set("birdsnap", split, root)
    assert isinstance(image_set, ImageFiles)
    return image_set


def widths(image_set: ImageFiles) -> list[int]:
    return [image_set.image(index).width for index in range(len(image_set))]


def test_the_test_images_are_listed_and_the_others_are_for_training(root: Path) -> None:
    train, test = opened("train", root), opened("test", root)
    assert train.class_names == test.class_names == ["Acadian Flycatcher", "Anna's Hummingbird"]
    assert (widths(train), train.labels.tolist()) == ([22, 23, 24], [0, 0, 1])
    assert (widths(test), test.labels.tolist()) == ([21, 25], [1, 0])


def test_images_that_were_never_downloaded_are_left_out_and_counted(root: Path) -> None:
    (root / "birdsnap" / "download" / "images" / "Acadian_Flycatcher" / "22.jpg").unlink()
    train = opened("train", root)
    assert (widths(train), train.labels.tolist()) == ([23, 24], [0, 1])
    assert count_differences("birdsnap", "train", train)[1] == (
        "birdsnap has 2 training images, but Table 4 of the paper says 47,386 "
        "(images whose addresses are dead are missing)"
    )


def test_a_species_without_a_folder_is_left_out(root: Path) -> None:
    folder = root / "birdsnap" / "download" / "images"
    (folder / "Annas_Hummingbird").rename(folder / "elsewhere")
    assert widths(opened("train", root)) == [22, 23]


def test_a_split_without_any_image_is_refused(root: Path) -> None:
    for path in TEST_PATHS:
        (root / "birdsnap" / "download" / "images" / path).unlink()
    with pytest.raises(ValueError, match=r"images has none of the 2 test images; run get_birdsnap\.py in"):
        opened("test", root)


@pytest.mark.parametrize("hostile", ["../../secret.jpg", "/etc/passwd", "a/../../b.jpg", ""])
def test_a_listed_path_cannot_leave_the_folder(root: Path, hostile: str) -> None:
    write_table(root / "birdsnap" / "images.txt", [HEADER, image_row(*IMAGES[0]), image_row(hostile, "1")])
    with pytest.raises(ValueError, match=r"images.txt, line 3: '.*' is not a path below .*; replace the file"):
        opened("train", root)


@pytest.mark.parametrize(
    ("name", "rows", "complaint"),
    [
        ("images.txt", [HEADER, image_row("a/1.jpg", "3")], "line 2: species.txt has no species '3'; replace both"),
        ("images.txt", [HEADER, ("http://example.org",)], "line 2: 1 fields, expected the 10 of the first line"),
        ("images.txt", [("url", "path")], r"line 1: the field 'species_id' is missing in \['url', 'path'\]"),
        ("images.txt", [], r"line 1: the field 'path' is missing in \[''\]"),
        ("species.txt", [("id", "common"), ("1",)], "line 2: 1 fields, expected the 2 of the first line"),
        ("species.txt", [("common",)], "line 1: the field 'id' is missing"),
        ("test_images.txt", [("path",), ("a/1.jpg",)], "line 2: images.txt has no image 'a/1.jpg'; replace both"),
        ("test_images.txt", [(TEST_PATHS[0],)], "line 1: the field 'path' is missing"),
    ],
)
def test_a_broken_line_is_named(root: Path, name: str, rows: list[tuple[str, ...]], complaint: str) -> None:
    path = root / "birdsnap" / name
    write_table(path, rows)
    with pytest.raises(ValueError, match=f"^{path}, {complaint}") as raised:
        opened("train", root)
    assert "\n" not in str(raised.value)
