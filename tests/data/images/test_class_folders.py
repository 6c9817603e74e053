"""ImageNet in one folder per class: order, links, and what is said of folders and images that are broken."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from gpipe.data import BrokenImage, DataMissing, check_image_set, open_image_set
from gpipe.data.images.class_folders import check_own_folders, open_own_folders
from tests.data.permissions import bound_by_permissions, folder_for_everybody


@pytest.fixture
def imagenet_root(tmp_path: Path) -> Path:
    """Write two classes of ImageNet's layout: three training images and one validation image each."""
    for class_index, wnid in enumerate(("n01440764", "n01443537")):
        for folder, names in (
            ("train", [f"{wnid}_{number}.JPEG" for number in (7, 10026, 18)]),
            ("val", [f"ILSVRC2012_val_0000000{class_index}.JPEG"]),
        ):
            (tmp_path / folder / wnid).mkdir(parents=True)
            for number, name in enumerate(names):
                Image.new("RGB", (40 + number, 30), (100 * class_index, 0, 200)).save(tmp_path / folder / wnid / name)
    return tmp_path


def test_imagenet_layout(imagenet_root: Path) -> None:
    train, test = (open_image_set("imagenet", split, imagenet_root) for split in ("train", "test"))
    assert train.class_names == test.class_names == ["n01440764", "n01443537"]
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1] and test.labels.tolist() == [0, 1]
    assert {train.image(index).size for index in range(3)} == {(40, 30), (41, 30), (42, 30)}
    assert test.image(1).mode == "RGB"


def test_imagenet_opens_in_a_fresh_process(imagenet_root: Path) -> None:
    """Importing torchvision needs the guard first, whoever comes first."""
    call = f"open_image_set('imagenet', 'train', {str(imagenet_root)!r})"
    program = f"from gpipe.data import open_image_set; print(len({call}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "6\n"


def test_imagenet_classes_must_agree(imagenet_root: Path) -> None:
    (imagenet_root / "val" / "n01443537").rename(imagenet_root / "val" / "n99999999")
    with pytest.raises(ValueError, match="different in 'n01443537'; sort the val images"):
        open_image_set("imagenet", "train", imagenet_root)


def test_imagenet_follows_links_in_the_order_of_torchvision(imagenet_root: Path, tmp_path_factory) -> None:
    import gpipe._compat.torchvision  # noqa: F401  (before torchvision)

    # isort: split
    from torchvision.datasets import ImageFolder

    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (imagenet_root / "train" / "n01440764").rename(elsewhere / "images")
    (imagenet_root / "train" / "n01440764").symlink_to(elsewhere / "images")
    for name in ("b", "a/c", "a"):
        (elsewhere / "images" / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(elsewhere / "images" / name / "x.PNG")
    train, expected = open_image_set("imagenet", "train", imagenet_root), ImageFolder(imagenet_root / "train")
    assert [(str(train.path(index)), label) for index, label in enumerate(train.labels)] == expected.samples
    assert len(train) == 9


@pytest.mark.parametrize("target", [".", "..", "../..", "../n01443537"])
def test_a_link_that_leads_back_is_refused_by_name(imagenet_root: Path, target: str) -> None:
    (imagenet_root / "train" / "n01443537" / "link").symlink_to(target)
    (imagenet_root / "train" / "n01440764" / "link").symlink_to(target)
    with pytest.raises(ValueError, match=r"train/n0144\S+ leads to \S+ again, whose files .*; remove the link"):
        open_image_set("imagenet", "train", imagenet_root)


def test_a_folder_that_cannot_be_read_is_refused_by_name(imagenet_root: Path) -> None:
    open_image_set("imagenet", "train", imagenet_root)  # which loads what it needs
    with folder_for_everybody() as folder:
        root = shutil.copytree(imagenet_root, folder / "imagenet")
        root.chmod(0o755)
        (unreadable := root / "train" / "n01440764" / "more").mkdir(0o000)
        message = r"cannot list \S+/n01440764/more: Permission denied; make it readable"
        with bound_by_permissions(), pytest.raises(ValueError, match=message):
            open_image_set("imagenet", "train", root)
        unreadable.rmdir()


def test_a_class_without_images_is_refused_by_name(imagenet_root: Path) -> None:
    for path in (imagenet_root / "val" / "n01443537").iterdir():
        path.rename(path.with_suffix(".txt"))
    with pytest.raises(FileNotFoundError, match=r"val/n01443537 has no image, expected files that end with \.jpg"):
        open_image_set("imagenet", "test", imagenet_root)


def test_grey_and_disguised_files_decode_to_rgb(imagenet_root: Path) -> None:
    """ImageNet has a PNG and some CMYK pictures named .JPEG, and grey ones."""
    train = open_image_set("imagenet", "train", imagenet_root)
    folder = imagenet_root / "train" / "n01440764"
    for path, mode, file_format in zip(
        sorted(folder.iterdir()), ("L", "CMYK", "RGBA"), ("JPEG", "JPEG", "PNG"), strict=True
    ):
        Image.new(mode, (8, 8)).save(path, format=file_format)
    assert [train.image(index).mode for index in range(3)] == ["RGB"] * 3


@pytest.mark.parametrize("damage", [lambda raw: b"", lambda raw: b"no picture", lambda raw: raw[: len(raw) // 2]])
def test_broken_image_names_its_path(imagenet_root: Path, damage) -> None:
    train = open_image_set("imagenet", "train", imagenet_root)
    path = imagenet_root / "train" / "n01440764" / "n01440764_18.JPEG"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BrokenImage, match=f"cannot decode {path}: .+; remove or replace it"):
        train.image(1)


def test_flat_val_folder_counts_as_missing(imagenet_root: Path) -> None:
    for folder in (imagenet_root / "val").iterdir():
        for path in folder.iterdir():
            path.rename(imagenet_root / "val" / path.name)
        folder.rmdir()
    with pytest.raises(DataMissing, match=r"Looked for: val/\*/ in"):
        check_image_set("imagenet", imagenet_root)


@pytest.fixture
def own_root(tmp_path: Path) -> Path:
    """Write two classes of one's own, of 10 and 3 images, and a folder that is hidden."""
    for name, count in (("cats", 10), ("dogs", 3)):
        (tmp_path / name).mkdir()
        for number in range(count):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / name / f"{number}.png")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    return tmp_path


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.99])
def test_a_share_of_each_class_evaluates_and_the_others_train(own_root: Path, share: float) -> None:
    train, test = (open_image_set("image_folder", split, own_root, share) for split in ("train", "test"))
    assert train.class_names == test.class_names == ["cats", "dogs"]
    paths = [{images.path(index) for index in range(len(images))} for images in (train, test)]
    assert not paths[0] & paths[1]
    assert paths[0] | paths[1] == set(own_root.rglob("*.png"))
    for label, count in enumerate((10, 3)):
        expected = min(max(1, round(share * count)), count - 1)
        assert (test.labels == label).sum() == expected
    again = open_image_set("image_folder", "test", own_root, share)
    assert [again.path(index) for index in range(len(again))] == [test.path(index) for index in range(len(test))]


def test_an_image_more_moves_at_most_one_other_over_the_border_of_a_share(own_root: Path) -> None:
    def read_paths(split: str) -> set[str]:
        images = open_image_set("image_folder", split, own_root, 0.3)
        return {str(images.path(index)) for index in range(len(images))}

    before = {split: read_paths(split) for split in ("train", "test")}
    for number in range(20):
        (own_root / "cats" / f"+{number}.png").write_bytes((own_root / "cats" / "0.png").read_bytes())
        after = {split: read_paths(split) for split in ("train", "test")}
        assert len(before["test"] & after["train"]) + len(before["train"] & after["test"]) <= 1
        before = after


def test_a_share_of_train_is_taken_where_there_is_such_a_folder(own_root: Path) -> None:
    (own_root / "train").mkdir()
    for name in ("cats", "dogs"):
        (own_root / name).rename(own_root / "train" / name)
    assert len(open_image_set("image_folder", "train", own_root, 0.5)) == 5 + 1


def test_gifs_count_and_files_that_are_left_out_are_named(own_root: Path) -> None:
    Image.new("P", (8, 8)).save(own_root / "cats" / "moving.GIF")
    for name in ("a.heic", "b.txt", ".DS_Store", "._0.png"):
        (own_root / "dogs" / name).write_bytes(b"")
    images = open_own_folders(own_root, "train", 0.3), open_own_folders(own_root, "test", 0.3)
    assert sum(map(len, images)) == 11 + 3
    for split in images:
        assert split.warnings() == [
            f"2 files below {own_root} left out, such as dogs/a.heic: convert those that are images to JPEG or PNG"
        ]


@pytest.mark.parametrize("hidden", [".thumbnails", "@eaDir"])
def test_thumbnails_in_hidden_folders_are_no_images(own_root: Path, hidden: str) -> None:
    shutil.copytree(own_root / "dogs", own_root / hidden)
    for name in ("cats", "dogs"):
        shutil.copytree(own_root / name, own_root / name / hidden / "small")
    splits = [open_own_folders(own_root, split, 0.3) for split in ("train", "test")]
    assert [images.class_names for images in splits] == [["cats", "dogs"]] * 2
    assert sum(map(len, splits)) == 10 + 3


def test_one_image_of_a_class_cannot_be_shared_out(own_root: Path) -> None:
    for number in (1, 2):
        (own_root / "dogs" / f"{number}.png").unlink()
    with pytest.raises(ValueError, match=r"the class dogs has one image, expected 2 or more"):
        open_image_set("image_folder", "train", own_root, 0.5)


def test_own_images_need_a_split_or_a_share(own_root: Path) -> None:
    with pytest.raises(ValueError, match=r"which has no train/<class> and val/<class>: .* data.validation_share=0.1"):
        check_image_set("image_folder", own_root)
    (own_root / "val").touch()  # a file holds no images
    check_image_set("image_folder", own_root, validation_share=0.1)
    (own_root / "val").unlink()
    (own_root / "val").mkdir()
    with pytest.raises(ValueError, match=r"data.validation_share is 0.1, but .*val has images for evaluation"):
        check_image_set("image_folder", own_root, validation_share=0.1)


@pytest.mark.parametrize("name", [b"caf\xe9", b"two\nlines", b"red\x1b[31m", "\u2028".encode()])
def test_a_class_whose_name_no_line_can_show_is_refused(tmp_path: Path, name: bytes) -> None:
    (tmp_path / "Icon\r").touch()  # of a Mac, and no class
    for each in (b"cat", "\u0645\u06cc\u200c\u062e".encode(), name):
        (tmp_path / os.fsdecode(each)).mkdir()
    shown = re.escape(ascii(os.fsdecode(name))[1:])
    with pytest.raises(ValueError, match=rf"/{shown} has a name that is not one line of UTF-8 .*: rename it\.$"):
        check_own_folders(tmp_path, 0.5)
