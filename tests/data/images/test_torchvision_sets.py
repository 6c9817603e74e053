"""Image sets that torchvision reads: what they hold, and what is said of broken files."""

import builtins
import hashlib
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpipe.data import BrokenImage, ImageFiles, open_image_set
from gpipe.data.images.torchvision_sets import torchvision_class
from tests.data.images.small_sets import CLASS_NAMES, LABELS, WRITERS, write_annotations

CASES = {
    "stanford_cars": ("StanfordCars", {"train": {"split": "train"}, "test": {"split": "test"}}),
    "oxford_pets": ("OxfordIIITPet", {"train": {"split": "trainval"}, "test": {"split": "test"}}),
    "food101": ("Food101", {"train": {"split": "train"}, "test": {"split": "test"}}),
    "fgvc_aircraft": ("FGVCAircraft", {"train": {"split": "trainval"}, "test": {"split": "test"}}),
}
LISTINGS = {
    "stanford_cars": "stanford_cars/devkit/cars_train_annos.mat",
    "oxford_pets": "oxford-iiit-pet/annotations/trainval.txt",
    "food101": "food-101/meta/train.json",
    "fgvc_aircraft": "fgvc-aircraft-2013b/data/images_variant_trainval.txt",
}
CIFAR_CLASSES = {"cifar10": ["airplane", "automobile", "bird"], "cifar100": ["apple", "aquarium_fish", "baby"]}
TORCHVISION = {"cifar10": "CIFAR10", "cifar100": "CIFAR100"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write all four sets below one folder."""
    for write in WRITERS.values():
        write(tmp_path)
    return tmp_path


def test_torchvision_is_imported_behind_its_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torchvision needs the guard first, whoever comes first."""
    imported, guard = [], "gpipe._compat.torchvision"
    plain = builtins.__import__
    monkeypatch.delitem(sys.modules, guard, raising=False)
    monkeypatch.setattr(builtins, "__import__", lambda name, *rest: imported.append(name) or plain(name, *rest))
    torchvision_class("Food101")
    assert imported.index(guard) < imported.index("torchvision")


def opened(name: str, split: str, root: Path) -> ImageFiles:
    image_set = open_image_set(name, split, root)
    assert isinstance(image_set, ImageFiles)
    return image_set


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", CASES)
def test_a_set_is_what_torchvision_reads(root: Path, name: str, split: str) -> None:
    class_name, options = CASES[name]
    oracle = torchvision_class(class_name)(root, **options[split])
    image_set = opened(name, split, root)
    assert image_set.class_names == oracle.classes == CLASS_NAMES[name]
    assert len(image_set) == len(oracle)
    for index, (image, label) in enumerate(oracle):
        assert image_set.labels[index] == label
        assert image_set.image(index).size == image.size
        assert image_set.image(index).tobytes() == image.tobytes()


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", ["stanford_cars", "oxford_pets", "fgvc_aircraft"])
def test_the_images_come_in_the_order_of_the_list(root: Path, name: str, split: str) -> None:
    image_set = opened(name, split, root)
    assert image_set.labels.tolist() == LABELS[split]
    assert [image_set.image(index).width for index in range(len(image_set))] == [
        20 + number for number in range(len(LABELS[split]))
    ]


def test_the_images_of_food101_come_class_by_class(root: Path) -> None:
    image_set = opened("food101", "train", root)
    assert image_set.labels.tolist() == [2, 2, 0, 0, 1]
    assert [image_set.image(index).width for index in range(5)] == [20, 24, 21, 23, 22]


@pytest.mark.parametrize("name", CASES)
def test_the_working_folder_may_be_the_root(root: Path, name: str, monkeypatch) -> None:
    expected = opened(name, "test", root)
    monkeypatch.chdir(root)
    image_set = opened(name, "test", Path())
    assert not image_set.path(0).is_absolute()
    assert image_set.image(0).tobytes() == expected.image(0).tobytes()


@pytest.mark.parametrize("name", CASES)
def test_a_broken_image_names_its_path(root: Path, name: str) -> None:
    image_set = opened(name, "test", root)
    path = image_set.path(1)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(BrokenImage, match=f"cannot decode {path}: .+; remove or replace it"):
        image_set.image(1)


@pytest.mark.parametrize("name", CASES)
def test_missing_images_are_found_before_training(root: Path, name: str) -> None:
    image_set = opened(name, "train", root)
    for index in (1, 3):
        image_set.path(index).unlink()
    first = image_set.path(1).relative_to(image_set.root)
    with pytest.raises(
        ValueError, match=f"^2 of the 5 images in .*{LISTINGS[name]} are not in .*, the first is {first};"
    ):
        opened(name, "train", root)


@pytest.mark.parametrize("hostile", ["../../secret", "/etc/passwd"])
@pytest.mark.parametrize("name", ["oxford_pets", "fgvc_aircraft"])
def test_a_listed_path_cannot_leave_the_folder(root: Path, name: str, hostile: str) -> None:
    listing = root / LISTINGS[name]
    first, second, *rest = listing.read_text().splitlines()
    second = f"{hostile} {second.partition(' ')[2]}"
    listing.write_text("\n".join([first, second, *rest]))
    with pytest.raises(
        ValueError, match=f"^{listing}, line 2: '{hostile}.jpg' is not a path below .*; replace the file"
    ):
        opened(name, "train", root)


@pytest.mark.parametrize("hostile", ["../cars_test/00001.jpg", "/etc/passwd"])
def test_an_annotated_path_cannot_leave_the_folder(root: Path, hostile: str) -> None:
    listing = root / LISTINGS["stanford_cars"]
    write_annotations(listing, ["00001.jpg", hostile, "00003.jpg"], [0, 1, 2])
    with pytest.raises(ValueError, match=f"^{listing}, annotation 2: '.*' is not a path below"):
        opened("stanford_cars", "train", root)


def test_a_path_in_json_cannot_leave_the_folder(root: Path) -> None:
    listing = root / LISTINGS["food101"]
    listing.write_text(json.dumps({"apple_pie": ["../../../secret"], "baby_back_ribs": [], "waffles": []}))
    with pytest.raises(ValueError, match=f"^{listing}, image 1: '../../../secret.jpg' is not a path below"):
        opened("food101", "train", root)


@pytest.mark.parametrize(
    ("name", "line", "complaint"),
    [
        ("oxford_pets", "Birman_1 3", "cannot read {}: ValueError: not enough values .*; replace it"),
        ("oxford_pets", "Birman_1 three 1 2", "cannot read {}: ValueError: .*'three'; replace it"),
        ("oxford_pets", "", "cannot read {}: ValueError: not enough values .*; replace it"),
        ("oxford_pets", "Birman_0 0 1 2", "{}, line 3: the class 0 is not one of 1 to 3; replace the file"),
        ("fgvc_aircraft", "1025795", "cannot read {}: ValueError: not enough values .*; replace it"),
        ("fgvc_aircraft", "1025795 Zeppelin", "cannot read {}: KeyError: 'Zeppelin'; replace it"),
        ("fgvc_aircraft", "", "cannot read {}: ValueError: not enough values .*; replace it"),
    ],
)
def test_a_broken_line_is_refused(root: Path, name: str, line: str, complaint: str) -> None:
    listing = root / LISTINGS[name]
    lines = listing.read_text().splitlines()
    listing.write_text("\n".join([*lines[:2], line, *lines[3:]]))
    with pytest.raises(ValueError, match=f"^{complaint.format(listing)} with the original"):
        opened(name, "train", root)


def test_a_class_that_the_cars_do_not_have_is_named(root: Path) -> None:
    listing = root / LISTINGS["stanford_cars"]
    write_annotations(listing, ["00001.jpg", "00002.jpg"], [0, 3])
    with pytest.raises(ValueError, match=f"^{listing}, annotation 2: the class 4 is not one of 1 to 3; replace"):
        opened("stanford_cars", "train", root)


@pytest.mark.parametrize("name", CASES)
def test_a_list_that_is_something_else_is_named(root: Path, name: str) -> None:
    listing = root / LISTINGS[name]
    listing.write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match=f"{listing}.*; replace (it|the file) with the original") as raised:
        opened(name, "train", root)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["oxford_pets", "fgvc_aircraft"])
def test_an_empty_list_is_refused(root: Path, name: str) -> None:
    listing = root / LISTINGS[name]
    listing.write_text("")
    with pytest.raises(ValueError, match=f"^{listing} lists no images; replace it"):
        opened(name, "train", root)


def test_a_list_of_food101_without_one_class_would_shift_the_others(root: Path) -> None:
    listing = root / LISTINGS["food101"]
    classes = json.loads(listing.read_text())
    del classes["baby_back_ribs"]
    listing.write_text(json.dumps(classes))
    with pytest.raises(
        ValueError, match=f"^{listing} has 2 classes and .*classes.txt has 3, different in 'baby_back_ribs'"
    ):
        opened("food101", "train", root)


class Trap:
    """Leave a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def write_pickle(path: Path, content: object) -> str:
    """Write as Python 2 did, and return the md5 checksum."""
    raw = pickle.dumps(content, protocol=2)
    path.write_bytes(raw)
    return hashlib.md5(raw).hexdigest()


def batch(num_images: int, label_key: str, seed: int) -> dict[str, object]:
    generator = np.random.default_rng(seed)
    return {
        "data": generator.integers(0, 256, (num_images, 3072), dtype=np.uint8),
        label_key: generator.integers(0, 3, num_images).tolist(),
    }


@pytest.fixture
def cifar_root(tmp_path: Path, monkeypatch) -> Path:
    """Write both sets, 4 images a file, as the files that torchvision takes for the originals."""
    for name, label_key in (("cifar10", "labels"), ("cifar100", "fine_labels")):
        cifar = torchvision_class(TORCHVISION[name])
        folder = tmp_path / cifar.base_folder
        folder.mkdir()
        for attribute in ("train_list", "test_list"):
            files = [file_name for file_name, _ in getattr(cifar, attribute)]
            written = [
                [file, write_pickle(folder / file, batch(4, label_key, seed))] for seed, file in enumerate(files)
            ]
            monkeypatch.setattr(cifar, attribute, written)
        checksum = write_pickle(folder / cifar.meta["filename"], {cifar.meta["key"]: CIFAR_CLASSES[name]})
        monkeypatch.setattr(cifar, "meta", {**cifar.meta, "md5": checksum})
    return tmp_path


@pytest.mark.parametrize(("name", "num_train_images"), [("cifar10", 20), ("cifar100", 4)])
@pytest.mark.parametrize("split", ["train", "test"])
def test_cifar_is_what_torchvision_reads(cifar_root: Path, name: str, split: str, num_train_images: int) -> None:
    image_set = open_image_set(name, split, cifar_root)
    oracle = torchvision_class(TORCHVISION[name])(cifar_root, train=split == "train")
    assert len(image_set) == len(oracle) == (num_train_images if split == "train" else 4)
    assert image_set.class_names == CIFAR_CLASSES[name]
    assert image_set.labels.dtype == np.int64
    for index, (image, label) in enumerate(oracle):
        assert image_set.labels[index] == label
        assert image_set.image(index).mode == "RGB"
        assert image_set.image(index).tobytes() == image.tobytes()


def test_a_pixel_of_cifar_is_where_the_format_says(cifar_root: Path) -> None:
    """An image is 1,024 bytes of red, then of green, then of blue, each row by row."""
    content = pickle.loads((cifar_root / "cifar-10-batches-py" / "data_batch_2").read_bytes())
    image = open_image_set("cifar10", "train", cifar_root).image(4 + 3)
    red, green, blue = content["data"][3].reshape(3, 32, 32)[:, 5, 30].tolist()
    assert image.getpixel((30, 5)) == (red, green, blue)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("cifar10", "cifar-10-batches-py/data_batch_3"),
        ("cifar10", "cifar-10-batches-py/test_batch"),
        ("cifar10", "cifar-10-batches-py/batches.meta"),
        ("cifar100", "cifar-100-python/train"),
        ("cifar100", "cifar-100-python/meta"),
    ],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_changed_pickle_is_refused_and_never_read(cifar_root: Path, name: str, path: str, split: str) -> None:
    write_pickle(cifar_root / path, Trap(cifar_root / "sprung"))
    folder = (cifar_root / path).parent
    with pytest.raises(
        ValueError, match=f"^{folder} has a file that is not the original.*unpack {name[:5]}-10.*again$"
    ):
        open_image_set(name, split, cifar_root)
    assert not (cifar_root / "sprung").exists()


def test_the_trap_springs_where_it_is_read(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "sprung")))
    assert (tmp_path / "sprung").exists()
